"""What a worker gives the daemon to copy: tensors in shared memory or on a GPU, and when their blocks are final."""
