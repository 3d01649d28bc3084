"""Reports of runs: pages and pictures of what `evorl.runs` has written."""
