"""The files of a run: its directory, its checkpoints with their restore, its progress and its lines."""
