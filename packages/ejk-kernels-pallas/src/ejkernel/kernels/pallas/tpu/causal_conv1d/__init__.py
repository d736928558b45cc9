"""The short causal convolution for TPUs, forward and backward."""
