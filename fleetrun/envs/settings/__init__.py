"""Options, environment variables and job files, resolved into one value."""
