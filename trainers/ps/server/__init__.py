"""A parameter server: members, steps, and what is answered."""
