"""What the launcher can learn from inside a process that it started, without a line in its script."""
