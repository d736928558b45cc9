"""Decoding from a paged key/value cache."""

from ejkernel.kernels.xla.page_attention.interface import heuristic, page_attention, sample_inputs

__all__ = ["heuristic", "page_attention", "sample_inputs"]
