"""The agents of a run: the first ones, their fitness, the elite, their evolution and opponents."""
