"""Linear attention in Triton: recurrent, gated and lightning attention, forward and backward."""
