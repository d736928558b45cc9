"""Mean pooling in Triton, forward and backward."""
