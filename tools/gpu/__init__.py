"""Scripts for a machine with a GPU: correctness at size, timing, tile sweeps."""
