"""Saved tables: manifest, writing and reading."""
