"""Answer `fleetrun status`, `stop` and similar commands at the socket of a running launcher."""
