"""Compiled loops over keys and rows. A call handles a whole request without the GIL. The loops work on
arrays, not on tables.
"""
