"""Start, watch, restart and stop the processes of one node."""
