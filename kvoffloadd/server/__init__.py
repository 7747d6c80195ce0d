"""The socket side of the daemon: listener, connections, sessions, instances. The rules of the cache live elsewhere."""
