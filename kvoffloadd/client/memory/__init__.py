"""Memory that a worker lets the daemon copy: tensors in shared memory or on a GPU, and when their blocks are final."""
