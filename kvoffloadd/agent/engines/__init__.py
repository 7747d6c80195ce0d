"""One module per store that the agent can speak to."""
