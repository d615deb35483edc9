"""The rendezvous protocol: which nodes take part, in which order. Pure decisions over the content of a
store.
"""
