"""The environment contract, and the settings of a run."""
