"""This node's addresses, ports and devices."""
