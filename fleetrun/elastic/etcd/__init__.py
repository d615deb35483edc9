"""The rendezvous store on etcd."""
