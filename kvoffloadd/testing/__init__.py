"""Runs a private daemon and child processes, and checks every byte: what demo, bench, scripts and tests share."""
