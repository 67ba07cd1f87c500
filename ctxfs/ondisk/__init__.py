"""Bytes of the cold tier and of the hot journal: no I/O, no clock, no loop."""
