"""Composition: makes the parts of a launch and connects them."""
