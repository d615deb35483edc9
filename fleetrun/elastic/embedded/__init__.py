"""The default store, which one launcher hosts and the others reach over ZeroMQ."""
