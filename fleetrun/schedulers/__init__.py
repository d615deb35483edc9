"""Hands a job to Slurm, Kubernetes, MPI or ssh, and reads what they say."""
