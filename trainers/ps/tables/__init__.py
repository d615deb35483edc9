"""Tables of dense blocks and sparse rows, with their update rules and the kernels that work on them."""
