"""Linear attention with one decay a row and head, for TPUs: three operations, one chunked core."""
