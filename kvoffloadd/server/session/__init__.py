"""One peer's session: its requests, jobs, pins and registered memory."""
