"""Trials that come with the package: a demo and a benchmark, each with a daemon of its own, and their parts."""
