"""Runs that are read: their files, lineage and agents, also from the Hub, as opponents and as first agents."""
