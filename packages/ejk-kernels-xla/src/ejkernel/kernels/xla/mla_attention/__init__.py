"""Multi-head latent attention in expanded form."""
