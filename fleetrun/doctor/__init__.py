"""`fleetrun doctor`: checks machines and the network between them before a launch."""
