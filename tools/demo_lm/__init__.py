"""The demo's pieces: text, model, training, decoding, pictures."""
