"""A trainer's side of the parameter servers: model and optimizer to tables and back."""
