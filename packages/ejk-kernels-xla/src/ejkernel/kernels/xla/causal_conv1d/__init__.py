"""The short causal convolution of linear-attention layers, over the tokens of each channel."""
