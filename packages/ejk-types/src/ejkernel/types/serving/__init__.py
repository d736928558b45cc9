"""Serving with paged caches: cache layouts, problems and schedule tables, for every backend."""
