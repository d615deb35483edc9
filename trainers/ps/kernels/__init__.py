"""Compiled loops over keys and rows, a whole request at a time, without the GIL: arrays, no tables."""
