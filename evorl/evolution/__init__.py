"""Evolution of the population: selection and mutation."""
