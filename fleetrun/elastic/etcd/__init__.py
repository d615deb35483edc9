"""The same store on etcd."""
