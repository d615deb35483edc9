"""The socket at which a running launcher answers `fleetrun status`, `stop` and the like."""
