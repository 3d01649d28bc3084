"""Data types shared by all packages: agents, batches, tensors by name, and how runs end."""
