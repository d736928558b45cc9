"""Recurrent attention: linear attention with every kind of gate."""
