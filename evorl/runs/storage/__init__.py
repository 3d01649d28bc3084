"""The files of a run: directory, checkpoints and their restore, progress and lines, and whose code may run."""
