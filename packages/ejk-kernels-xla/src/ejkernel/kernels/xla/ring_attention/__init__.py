"""Ring attention in XLA: the sequence is spread over devices, keys and values travel."""
