"""Calls of each family of operations: one file a family, for every purpose.

A file has the type of a call, how its arrays are drawn, its reference, and the lists: calls at the
sizes of a GPU (``-m gpu``, the memory checkers), the same in a few tiles (for what watches every
access), calls that are compiled ahead. Small calls that cut the tiles of one backend are in that
backend's tests.
"""
