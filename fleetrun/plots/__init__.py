"""`fleetrun plot`: the course of a training as a picture."""
