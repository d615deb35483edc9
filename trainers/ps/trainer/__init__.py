"""A trainer's side of the parameter servers. It maps model and optimizer to tables and back."""
