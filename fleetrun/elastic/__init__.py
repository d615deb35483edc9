"""Multi-node jobs: a shared store, the rendezvous, membership, and restarts of the whole job."""
