"""Native sparse attention on TPU: three branches, gated and added."""
