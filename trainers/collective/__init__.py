"""Collective training on torch.distributed, without a separate data path of fleetrun."""
