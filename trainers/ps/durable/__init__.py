"""What outlives a server process: a journal of what it acknowledged, and snapshots to shorten it."""
