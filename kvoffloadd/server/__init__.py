"""The socket side of the daemon: listener, connections, sessions, instances. No rule about what is where lives here."""
