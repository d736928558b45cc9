"""Scaled dot-product attention in Triton: flash attention with fewer options."""
