"""What a launch prints: log lines of processes, its own messages, the status line."""
