"""The default store: hosted by one launcher, spoken to over ZeroMQ."""
