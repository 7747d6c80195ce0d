"""The benchmark of the package: what a private daemon reaches here, beside what this machine could reach at best.

Both are measured in turn in the same rounds and reported as medians, so that other work on the machine slows both.
`kvoffloadd bench` measures a few cases. `scripts/bench` gives the same code more cases, and judges them by bounds.
"""
