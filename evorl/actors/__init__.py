"""Actor processes: they collect experience for their rank's learner and send it through shared memory."""
