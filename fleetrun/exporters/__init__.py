"""TensorBoard files and Prometheus metrics, written by a helper process of the launcher."""
