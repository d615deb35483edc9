"""Checkpoints of collective jobs."""
