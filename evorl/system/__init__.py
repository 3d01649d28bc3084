"""Files, memory, processes, threads and the terminal of this machine."""
