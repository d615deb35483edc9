"""A launcher for distributed training: starts and watches processes, and never imports torch."""
