"""How long a mount takes to answer, with many blocks in its cold tier."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import coldimage
from bench.daemon import Daemon, check_fuse

READY_SECONDS_MAX = 600.0
HOT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Mounting:
    """`recover_seconds`: the cold tier alone. `ready_seconds`: from the start of the daemon."""

    name: str
    blocks: int
    recover_seconds: float
    ready_seconds: float


def measure(base: Path, *, blocks: int, channel: str) -> Iterator[Mounting]:
    """Make the file, then mount it with its tables, and without any.

    Raises DaemonFailed.
    """
    check_fuse()
    cold = base / "cold"
    coldimage.make(cold, blocks)
    # The first of each is what counts: a close writes tables again, where there were none.
    with_tables = coldimage.recover(cold)
    yield _mount("checkpoint", base, cold, with_tables, channel, kept=True)
    coldimage.forget_tables(cold)
    without = coldimage.recover(cold)
    yield _mount("records", base, cold, without, channel, kept=False)


def _mount(
    name: str, base: Path, cold: Path, alone: coldimage.Recovery, channel: str, *, kept: bool
) -> Mounting:
    if not kept:
        coldimage.forget_tables(cold)
    _forget_pages(cold)
    mount_point = base / f"ctx-{name}"
    mount_point.mkdir()
    arguments = ["--hot", str(HOT_BYTES), "--cold", str(cold), "--channel", channel]
    daemon = Daemon(mount_point, base / f"state-{name}", arguments, ready_seconds=READY_SECONDS_MAX)
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        stack.enter_context(daemon)
        ready = time.perf_counter() - began
    return Mounting(name, alone.blocks, alone.seconds, ready)


def _forget_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
