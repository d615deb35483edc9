"""The role of a process in its job, found by a role maker."""
