"""What the paged, ragged and decoding operations share: cache layouts and one attention loop."""
