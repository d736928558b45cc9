"""Grouped matmul: consecutive runs of rows, each times its own matrix."""
