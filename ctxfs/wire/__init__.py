"""The bytes between members: messages, frames, connection state. docs/wire.md has the tables.

Pure: buffers in, values out, and back. Who moves the bytes, and over what, is not known here.
"""
