"""Who runs where: pure, from settings and offers to ranks and endpoints."""
