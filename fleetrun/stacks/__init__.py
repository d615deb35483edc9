"""Stacks of running processes."""
