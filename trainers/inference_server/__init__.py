"""The process behind `fleetrun serve`: a saved model over HTTP, by the Open Inference Protocol."""
