"""The benchmark of the package: what a daemon of its own reaches here, beside what this machine could reach at best.

Both are measured in turn in the same rounds, and told as medians, so that other work on the machine slows both.
"""
