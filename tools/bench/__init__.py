"""The repository's benchmark: results of record as JSON, Markdown and PNG.

The measuring itself (shapes, timing, limits, peers) is ``ejkernel.modules.bench``, which the
``ejk bench`` command shares.
"""
