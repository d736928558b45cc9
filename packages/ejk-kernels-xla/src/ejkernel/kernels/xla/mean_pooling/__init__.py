"""Mean pooling over sequences, packed sequences and their chunks."""
