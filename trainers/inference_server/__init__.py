"""The process behind `fleetrun serve`, which serves a saved model over HTTP by the Open Inference
Protocol.
"""
