"""How large a request is that a device takes in one piece."""

import os
from pathlib import Path

import pytest

from ctxfs.device.queues import WHOLE_BYTES, request_bytes_max

NUMBER = os.makedev(259, 3)
KIB = 1 << 10


def tree(root: Path, *, partition: bool, **limits: int) -> Path:
    """A /sys with one drive, 259:3 or the drive of the partition 259:3."""
    drive = root / "devices/drive"
    (drive / "queue").mkdir(parents=True)
    (drive / "part").mkdir()
    for name, value in limits.items():
        (drive / "queue" / name).write_text(f"{value}\n")
    (root / "dev/block").mkdir(parents=True)
    (root / "dev/block/259:3").symlink_to(drive / "part" if partition else drive)
    return root


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(
    ("kib", "segments", "bytes_max"),
    [
        (512, 1024, 512 * KIB),
        (1280, 127, 508 * KIB),
        (4096, 4096, WHOLE_BYTES),
        (1021, 4096, 1020 * KIB),
        (64, 4096, WHOLE_BYTES),  # it is split anyway
    ],
)
def test_the_limits_of_the_drive_hold_for_its_partitions_too(
    tmp_path: Path, partition: bool, kib: int, segments: int, bytes_max: int
) -> None:
    sys = tree(tmp_path, partition=partition, max_sectors_kb=kib, max_segments=segments)
    assert request_bytes_max(NUMBER, sys) == bytes_max


def test_where_nothing_is_told_requests_are_whole(tmp_path: Path) -> None:
    assert request_bytes_max(NUMBER, tmp_path) == WHOLE_BYTES
    assert request_bytes_max(NUMBER, tree(tmp_path, partition=False)) == WHOLE_BYTES
