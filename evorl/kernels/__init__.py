"""Code that the machine's compiler builds on first use. It changes the speed of training and nothing else."""
