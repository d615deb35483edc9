"""Who a process is in its job: each way to find out is a role maker."""
