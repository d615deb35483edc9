"""The wrapper around numba, below everything that is compiled."""
