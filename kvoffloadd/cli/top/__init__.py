"""The command `kvoffloadd top`: shows a daemon's figures as they change, in a terminal."""
