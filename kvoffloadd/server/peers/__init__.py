"""Peers and their users: accounts, queues of what is sent to them, descriptors, quarantine."""
