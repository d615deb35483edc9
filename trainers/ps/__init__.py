"""The parameter server: Table, Partition, Wire, Server, Client; pull and push."""
