"""A run as its ranks live it: its directory, checkpoints, recovery, metrics and trackers."""
