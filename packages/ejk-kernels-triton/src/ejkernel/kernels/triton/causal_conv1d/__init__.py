"""The short causal convolution in Triton, forward and backward."""
