"""Experiment trackers: Weights & Biases, TensorBoard and Trackio."""
