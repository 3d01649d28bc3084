"""What a run keeps on disk: its directory, its checkpoints with their restore, its progress and its lines."""
