"""State that outlives a server process: a write-ahead log of acknowledged requests, and snapshots to shorten
it.
"""
