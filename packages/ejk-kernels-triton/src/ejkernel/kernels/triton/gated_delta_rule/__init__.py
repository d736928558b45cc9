"""The gated delta rule in Triton, forward and backward."""
