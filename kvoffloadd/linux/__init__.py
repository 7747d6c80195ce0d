"""Thin wrappers of kernel interfaces: shared memory, sockets, limits, systemd, standard error."""
