"""Checkpoints of collective jobs that survive."""
