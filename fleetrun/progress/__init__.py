"""Receives what training processes report of their progress."""
