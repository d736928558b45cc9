"""Mean pooling for TPUs: means and their gradient, of chunks and of segments of rows."""
