"""Commands that start no job, one per file. Each module has `command`."""
