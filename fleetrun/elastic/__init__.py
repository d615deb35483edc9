"""Nodes that meet, leave and come back. Empty so far: this version runs on one machine."""
