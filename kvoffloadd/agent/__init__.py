"""The agent: a process of its own that speaks to the remote store, so that nothing of it can hurt the daemon."""
