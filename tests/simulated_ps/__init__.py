"""Servers and trainers of a parameter-server job in one thread, on a clock that jumps, from one seed."""
