"""How large a request a block device takes in one piece, as /sys tells."""

import mmap
import os
from pathlib import Path

SYS = Path("/sys")
WHOLE_BYTES = 1 << 20  # larger requests gain nothing: a device works on several side by side
WORTH_BYTES = 128 << 10  # pieces below this cost more than they save


def request_bytes_max(device_number: int, sys: Path = SYS) -> int:
    """What one request should move at most, a multiple of the page size.

    `device_number`: `st_rdev` of a block device. The block layer splits what is larger, but not for
    a caller that must not wait: io_uring is refused, and hands the request to a thread of the
    kernel, where the memory is looked up once more.
    """
    number = f"{os.major(device_number)}:{os.minor(device_number)}"
    device = sys / "dev/block" / number
    # A partition has no queue of its own.
    for queue in (device / "queue", device.resolve().parent / "queue"):
        kib, segments = _number(queue / "max_sectors_kb"), _number(queue / "max_segments")
        if kib is not None and segments is not None:
            found = min(WHOLE_BYTES, kib << 10, segments * mmap.PAGESIZE)
            found -= found % mmap.PAGESIZE
            return found if found >= WORTH_BYTES else WHOLE_BYTES
    return WHOLE_BYTES


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
