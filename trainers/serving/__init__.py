"""Models as files that run without fleet: programs and their weights. `trainers.inference` loads them."""
