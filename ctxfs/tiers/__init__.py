"""Hot and cold: one shape."""
