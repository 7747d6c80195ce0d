"""Trials that come with the package: a demo and a benchmark, each with a private daemon, and their parts."""
