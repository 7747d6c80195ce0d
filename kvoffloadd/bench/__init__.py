"""The benchmark of the package: compares a private daemon with the best that this machine could reach.

Both are measured in turn in the same rounds and reported as medians, so that other work on the machine slows both.
`kvoffloadd bench` measures a few cases. `scripts/bench` gives the same code more cases, and judges them by bounds.
"""
