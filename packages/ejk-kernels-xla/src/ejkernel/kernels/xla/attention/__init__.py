"""Plain attention that also returns its weights."""
