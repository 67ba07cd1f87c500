"""The only code that touches io_uring, block devices and tmpfs."""
