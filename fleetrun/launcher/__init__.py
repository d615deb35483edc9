"""Make the parts of a launch and connect them."""
