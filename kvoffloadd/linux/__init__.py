"""Thin wrappers of what the kernel offers: shared memory, sockets, limits, systemd, standard error."""
