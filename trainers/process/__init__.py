"""The error report of a process, its exit hooks, and its stacks."""
