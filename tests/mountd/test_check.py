"""What is found out about the machine before anything is opened."""

import os
from pathlib import Path

import pytest

from ctxfs.config import ColdConfig, Config, HotConfig, LogConfig, MountConfig
from ctxfs.errors import ConfigError
from ctxfs.units import GIB, MIB, TIB
from mountd import check


@pytest.fixture
def point(tmp_path: Path) -> Path:
    path = tmp_path / "mount"
    path.mkdir()
    return path


def config(point: Path, *cold: ColdConfig, log: Path | None = None) -> Config:
    return Config(
        state=point.parent / "state" / "deep",
        hot=HotConfig(size_bytes=GIB),
        mount=MountConfig(path=point),
        cold=cold,
        log=LogConfig(file=log),
    )


def found(wanted: Config) -> list[str]:
    """The problems, but for those of a machine that has no FUSE at all."""
    return [text for text in check.problems(wanted) if not text.startswith("/dev/fuse")]


def test_what_can_be_done_is_no_problem_and_nothing_is_changed(point: Path) -> None:
    cold = point.parent / "cold"
    assert found(config(point, ColdConfig(path=cold, size_bytes=16 * MIB))) == []
    assert [path.name for path in point.parent.iterdir()] == ["mount"]


def test_all_problems_are_found_together(point: Path) -> None:
    parent = point.parent
    (parent / "file").touch()
    wanted = config(
        parent / "none",
        ColdConfig(path=parent / "unsized"),
        ColdConfig(path=parent / "huge", size_bytes=1024 * TIB),
        ColdConfig(path=Path("/dev/null")),
        ColdConfig(path=parent / "file" / "x"),
        log=parent / "file" / "log",
    )
    reasons = found(wanted)
    assert [text.partition(":")[0].replace(f"{parent}/", "") for text in reasons] == [
        "none",
        "directory of the log file file",
        "cold unsized",
        "cold huge",
        "cold /dev/null",
        "cold file/x",
    ]


def test_no_mount_point_is_a_problem(point: Path) -> None:
    wanted = Config(state=point, hot=HotConfig(size_bytes=GIB))
    assert any(text.startswith("no mount point:") for text in check.problems(wanted))


def test_the_size_of_a_cold_file_is_what_is_configured_or_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    assert check.cold_bytes(ColdConfig(path=path, size_bytes=GIB)) == GIB
    with pytest.raises(ConfigError, match="does not exist; give its size"):
        check.cold_bytes(ColdConfig(path=path))
    path.write_bytes(bytes(4096))
    assert check.cold_bytes(ColdConfig(path=path)) == 4096


def test_memory_is_bounded_by_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(check, "CGROUPS", tmp_path)
    assert check.memory_bytes() == machine
    (tmp_path / "memory.max").write_text("max\n")
    assert check.memory_bytes() == machine
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    assert check.memory_bytes() == 64 * MIB


def test_an_ordinary_user_needs_to_write_to_the_directories(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    reasons = found(config(point))
    assert len(reasons) == 3
    assert "mounts only where it may write" in reasons[0]
    assert "install the package fuse3" in reasons[1]
    assert "this user may not write to" in reasons[2]
