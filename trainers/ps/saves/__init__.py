"""Saves of tables: manifest, writing, reading."""
