"""What the daemon and its agent both know: frames and names of objects."""
