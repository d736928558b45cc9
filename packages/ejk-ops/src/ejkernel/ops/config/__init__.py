"""Where configurations come from: caches, overrides, the selector chain."""
