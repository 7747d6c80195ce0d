"""`kvoffloadd top`: a daemon's figures as they change, for a terminal."""
