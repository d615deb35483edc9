"""The calls of the fleet API, by what they are about. `trainers.fleet` puts them together."""
