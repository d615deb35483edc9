"""Collective training on torch.distributed. fleetrun adds no data path of its own."""
