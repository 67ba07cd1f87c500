"""How much memory there is."""

from pathlib import Path

import pytest

from ctxfs.device.memory import give_back, memory_available_bytes, memory_total_bytes

MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n"
KIB = 1024


def make_root(root: Path, groups: dict[str, tuple[str, int, int]], ours: str = "/") -> Path:
    """A /proc and a /sys with these groups: limit, use, and cache that can be given back."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n0::{ours}\n")
    for name, (limit, used, cache) in groups.items():
        group = root / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return root


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    root = make_root(tmp_path, {"a": ("max", 500, 0)}, "/a")
    assert memory_total_bytes(root) == 1000 * KIB
    assert memory_available_bytes(root) == 600 * KIB


@pytest.mark.parametrize("ours", ["/a/b", "/a"])
def test_the_tightest_group_above_us_counts(tmp_path: Path, ours: str) -> None:
    groups = {"a": (str(500 * KIB), 300 * KIB, 100 * KIB), "a/b": ("max", 0, 0)}
    root = make_root(tmp_path, groups, ours)
    assert memory_total_bytes(root) == 500 * KIB
    assert memory_available_bytes(root) == 300 * KIB


def test_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    root = make_root(tmp_path, {"": (str(200 * KIB), 300 * KIB, 0)})
    assert memory_total_bytes(root) == 200 * KIB
    assert memory_available_bytes(root) == 0


def test_a_machine_without_control_groups_has_its_memory(tmp_path: Path) -> None:
    root = make_root(tmp_path, {})
    (root / "proc/self/cgroup").write_text("4:memory:/x\n")
    assert memory_total_bytes(root) == 1000 * KIB
    (root / "proc/self/cgroup").unlink()
    assert memory_available_bytes(root) == 600 * KIB


def test_this_machine_has_memory() -> None:
    assert 0 < memory_available_bytes() <= memory_total_bytes()


def test_what_is_used_stays_when_what_was_freed_is_given_back() -> None:
    kept = [bytes([n]) * 5000 for n in range(100)]
    freed = [bytes(5000) for _ in range(100)]
    freed.clear()
    give_back()
    assert all(each == bytes([n]) * 5000 for n, each in enumerate(kept))
