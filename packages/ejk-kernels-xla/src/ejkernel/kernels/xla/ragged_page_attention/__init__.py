"""Mixed prefill and decoding over a paged cache that already holds the new tokens."""
