"""kvoffloadd and its peers: the same work through each, one after the other, round by round."""
