"""Write and read the event log of a launch, and the times of log lines."""
