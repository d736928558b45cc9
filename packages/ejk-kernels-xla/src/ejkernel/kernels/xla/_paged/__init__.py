"""Cache layouts and the attention loop of the paged, ragged and decoding operations."""
