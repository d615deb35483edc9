"""This machine: addresses, ports, devices."""
