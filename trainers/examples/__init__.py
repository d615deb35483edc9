"""Runnable scripts: `fleetrun -m trainers.examples.NAME`, or by path."""
