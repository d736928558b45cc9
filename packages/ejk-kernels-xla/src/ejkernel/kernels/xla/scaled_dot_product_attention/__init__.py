"""Scaled dot product attention without extras."""
