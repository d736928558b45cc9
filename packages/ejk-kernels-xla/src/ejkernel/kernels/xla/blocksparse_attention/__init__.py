"""Block-sparse attention in XLA: every head loops over the list of its own tiles."""
