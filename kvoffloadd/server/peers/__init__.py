"""Peers and their users: accounts, queues of outgoing frames, descriptors, quarantine."""
