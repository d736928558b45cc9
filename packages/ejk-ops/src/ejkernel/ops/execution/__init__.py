"""Running kernels: the executor, tuning, batches, several processes."""
