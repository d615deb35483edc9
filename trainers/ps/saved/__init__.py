"""Tables as files: saved by any number of servers, loaded onto any other number, read without servers."""
