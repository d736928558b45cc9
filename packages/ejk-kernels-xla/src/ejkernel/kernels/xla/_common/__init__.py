"""Pieces that several XLA implementations share."""
