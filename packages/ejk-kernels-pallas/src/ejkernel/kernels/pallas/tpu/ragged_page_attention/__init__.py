"""Packed rows of any mix of prefill and decoding over a paged cache, for TPUs."""
