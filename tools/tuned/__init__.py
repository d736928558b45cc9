"""The pieces of ``tools/tune_tables.py``: which calls, in which order, and what came of it."""
