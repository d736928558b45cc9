"""What the kernels of softmax attention share, whatever their backend."""
