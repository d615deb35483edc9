"""The wire between trainers and servers: bytes, sockets, requests."""
