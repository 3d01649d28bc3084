"""The agents of a run: their fitness, the best of them, and their comparison with twins."""
