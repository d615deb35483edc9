"""Options, variables and job files, resolved into one value."""
