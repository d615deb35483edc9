"""`fleetrun plot`: the course of a training as a picture."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hides messages about its caches at its import
