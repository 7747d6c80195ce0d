"""kvoffloadd: a KV-cache offload daemon. Importing the package loads neither torch nor CUDA."""

__version__ = "0.1.0"
