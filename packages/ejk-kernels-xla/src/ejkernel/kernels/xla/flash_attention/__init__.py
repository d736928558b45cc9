"""Flash attention in XLA: blockwise forward and backward, memory linear in the lengths."""
