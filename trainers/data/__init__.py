"""Data sets: MultiSlot files, click logs, images, and the share of each trainer."""
