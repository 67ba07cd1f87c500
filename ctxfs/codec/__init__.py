"""Pure functions over buffers: byte planes, compression, encryption, digest."""
