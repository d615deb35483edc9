"""Processes of one machine: start, watch, restart, stop."""
