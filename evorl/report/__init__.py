"""Reports of runs: HTML pages and plots of the files that `evorl.runs` writes."""
