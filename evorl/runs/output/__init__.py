"""What a run says: metrics, log, terminal, callbacks and videos."""
