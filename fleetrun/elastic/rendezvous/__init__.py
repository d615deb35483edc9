"""Who takes own, in which order: pure decisions over what the store says."""
