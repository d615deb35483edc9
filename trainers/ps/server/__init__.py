"""A parameter server with its members, its steps and its answers."""
