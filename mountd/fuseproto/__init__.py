"""The bytes between the kernel's FUSE and a daemon: protocol 7.31 to 7.45 of linux/fuse.h.

Pure: buffers in, values out, and back. Numbers are in the machine's own byte order, as the kernel
writes them.
"""
