"""Pure functions over buffers: digest."""
