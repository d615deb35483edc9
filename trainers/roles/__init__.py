"""The role of a process in its job; each source of it is a role maker."""
