"""Mixed prefill and decoding that also writes the new tokens into the cache."""
