"""The record of a launch: its events, and the times of log lines."""
