"""The wrapper around numba, the base of all compiled code."""
