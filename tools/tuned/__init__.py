"""Parts of ``tools/tune_tables.py``: which calls, in which order, and the tables of winners."""
