"""Shared test support: float64 oracles, derived tolerances, the cases that are always there."""
