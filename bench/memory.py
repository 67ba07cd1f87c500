"""How much memory the daemon needs for a block: many small ones, before and after."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_SECONDS_MAX = 120.0
POLL_SECONDS = 0.2
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Memory:
    """`rss_*`: resident bytes of the daemon. `seconds`: making all blocks."""

    blocks: int
    hot_blocks: int  # in the hot tier afterwards, older ones too
    rss_before: int
    rss_after: int
    seconds: float

    @property
    def per_block(self) -> float:
        return (self.rss_after - self.rss_before) / self.blocks


class NoStatistics(Exception):
    """The mount does not say how many blocks it has, or how large its daemon is."""


def measure(folder: Path, mount_point: Path, *, blocks: int, size: int, each: int) -> Memory:
    """Make `blocks` files of `size` bytes in `folder`, `each` to a directory (0: all in one).

    Raises NoStatistics, and TimeoutError when the daemon has not sealed all of them in time.
    """
    before, _, rss_before = _read(mount_point)
    payload = b"x" * size
    began = time.perf_counter()
    for path in _paths(folder, blocks, each):
        with path.open("wb", buffering=0) as file:
            if payload:
                file.write(payload)
    seconds = time.perf_counter() - began
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        counted, hot_blocks, rss_after = _read(mount_point)
        if counted >= before + blocks:
            return Memory(blocks, hot_blocks, rss_before, rss_after, seconds)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{counted - before} of {blocks} blocks were sealed, no more")
        time.sleep(POLL_SECONDS)


def _paths(parent: Path, blocks: int, each: int) -> Iterator[Path]:
    folder = parent
    for number in range(blocks):
        if each and number % each == 0:
            folder = parent / f"{number // each:05x}"
            folder.mkdir()
        yield folder / f"{number:064x}"  # as long as a digest in hex, which most clients use


def _read(mount_point: Path) -> tuple[int, int, int]:
    """Return how many blocks are sealed, how many of them hot, and how large the daemon is."""
    path = mount_point / ".ctx" / "stats"
    try:
        statistics: dict[str, Any] = json.loads(path.read_text())
        sealed, hot = statistics["blocks"]["sealed"], statistics["tiers"]["hot"]["blocks"]
        return int(sealed), int(hot), int(statistics["memory"]["rss_bytes"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise NoStatistics(f"{path}: {error!r}") from error


def hot_bytes(blocks: int, size: int) -> int:
    """Room for all blocks in the hot tier, where even one byte fills a page."""
    return max(256 << 20, 2 * blocks * (-(-size // PAGE) * PAGE))
