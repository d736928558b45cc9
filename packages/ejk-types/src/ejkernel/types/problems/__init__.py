"""Static properties of calls, one dataclass per family of operations, shared by all backends."""
