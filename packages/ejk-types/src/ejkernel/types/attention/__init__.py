"""Parts that the softmax attention kernels of all backends share."""
