"""Schedules the daemon's work: lanes of threads, fair queues, turns of the event loop."""
