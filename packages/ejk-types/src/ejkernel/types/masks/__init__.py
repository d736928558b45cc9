"""Masks: what a query may see, as structure, and the blocks of keys that follow from it."""
