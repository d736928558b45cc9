"""Grouped matmul on TPU."""
