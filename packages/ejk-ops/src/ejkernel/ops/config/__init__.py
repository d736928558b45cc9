"""Sources of configurations: caches, overrides, the selector chain."""
