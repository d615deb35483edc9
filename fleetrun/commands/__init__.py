"""Commands that start no job, one to a file, in click's words. Each module has `command`."""
