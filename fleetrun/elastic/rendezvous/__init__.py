"""The rendezvous protocol, which decides which nodes take part and in which order. Pure decisions over the
content of a store.
"""
