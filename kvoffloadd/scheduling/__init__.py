"""Decides who runs when: lanes of threads, fair queues, turns of the event loop."""
