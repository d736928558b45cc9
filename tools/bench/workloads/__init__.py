"""Benchmarks that are not a table of calls: each has ``main(args)``."""
