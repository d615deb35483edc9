"""TensorBoard files and Prometheus metrics, written by a process beside the job."""
