"""The last message of a process, its exit hooks, its stacks."""
