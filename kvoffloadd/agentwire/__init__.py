"""The knowledge that the daemon and its agent share: frames and names of objects."""
