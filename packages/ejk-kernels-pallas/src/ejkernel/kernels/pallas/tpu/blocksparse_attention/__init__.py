"""Block-sparse attention, for TPUs."""
