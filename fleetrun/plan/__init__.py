"""Plan which process runs where. Pure functions turn settings and offers into ranks and endpoints."""
