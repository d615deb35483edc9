"""Several machines: a shared store, rendezvous, membership, restarts of the whole job."""
