"""What the store believes and decides: no I/O, no clock, no loop."""
