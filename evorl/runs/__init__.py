"""The lifecycle of a run on all ranks: its directory, checkpoints, recovery, metrics."""
