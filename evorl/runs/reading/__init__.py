"""Runs that are read: their files, lineage and agents, also from the Hub, and whose code may run."""
