"""The measuring stick: named shapes, device-synchronised timing, limits and peers of one run."""
