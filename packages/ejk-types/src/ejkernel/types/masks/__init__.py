"""Masks: the keys that a query may see, as structure, and the blocks of keys to visit."""
