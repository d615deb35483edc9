"""Write TensorBoard files and Prometheus metrics, in a helper process of the launcher."""
