"""How much memory there is, as far as this process may use it."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory_total_bytes(root: Path = _ROOT) -> int:
    """The machine's memory, or what our control groups (version 2) allow if that is less.

    `root` is where `proc` and `sys` lie.
    """
    limits = [limit for limit, _ in _cgroups(root)]
    return min([_meminfo(root, "MemTotal"), *limits])


def memory_available_bytes(root: Path = _ROOT) -> int:
    """What could be used without swapping, as the kernel and our control groups see it now."""
    rooms = [max(0, limit - used) for limit, used in _cgroups(root)]
    return min([_meminfo(root, "MemAvailable"), *rooms])


def give_back() -> None:
    """Return to the kernel what this process has freed, and the C library keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
    if trim is not None:
        trim(0)


def _meminfo(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/meminfo has no {name}")


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of every control group above us that has a limit.

    Page cache that can be given back is not counted as used.
    """
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    ours = [line[3:] for line in lines if line.startswith("0::")]
    if not ours:
        return
    group = top / ours[0].lstrip("/")
    for place in (group, *group.parents):
        try:
            limit = (place / "memory.max").read_text().strip()
            used = int((place / "memory.current").read_text())
            reclaimable = _inactive_file(place)
        except OSError:
            limit = "max"
        if limit != "max":
            yield int(limit), used - min(used, reclaimable)
        if place == top:
            return


def _inactive_file(place: Path) -> int:
    for line in (place / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
