"""Helpers of the framework: devices, shardings, serialisation, labels, buckets."""
