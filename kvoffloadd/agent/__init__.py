"""The agent: a separate process that speaks to the remote store, so that no failure there can hurt the daemon."""
