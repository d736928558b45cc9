"""The gated delta rule for TPUs, on the grid and the decays of linear attention."""
