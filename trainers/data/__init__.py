"""Data sets of MultiSlot files, click logs and images, and the share of each trainer."""
