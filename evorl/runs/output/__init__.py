"""The output of a run: metrics, log, terminal, callbacks and videos."""
