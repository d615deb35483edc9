"""Data for training: images of the examples, and each trainer's share of a data set."""
