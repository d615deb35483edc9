"""Nodes that meet, leave and come back. Empty so far: see docs/architecture.md; one machine is all there is."""
