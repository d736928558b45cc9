"""Block-sparse attention in XLA: every head walks the list of its own tiles."""
