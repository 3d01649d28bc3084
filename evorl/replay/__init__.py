"""What agents remember, and which of it is due to be learned from."""
