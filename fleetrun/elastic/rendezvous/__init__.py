"""Who takes part, in which order: pure decisions over what the store says."""
