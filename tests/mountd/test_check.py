"""What is found out about the machine before anything is opened."""

import errno
import os
from dataclasses import replace
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
    wanted = replace(wanted, state=parent / "file" / "state")
    reasons = found(wanted)
    assert [text.partition(":")[0].replace(f"{parent}/", "") for text in reasons] == [
        "none",
        "state directory file/state",
        "directory of the log file file",
        "cold unsized",
        "cold huge",
        "cold /dev/null",
        "cold file/x",
    ]


def test_a_cold_file_needs_a_directory_that_a_start_makes_or_finds(point: Path) -> None:
    parent = point.parent
    state = parent / "state" / "deep"  # as `config` has it
    wanted = [
        ColdConfig(path=path / "cold", size_bytes=16 * MIB)
        for path in (state, state.parent, parent, parent / "none", state / "none")
    ]
    assert found(config(point, *wanted)) == [
        f"cold {path}/cold: the directory {path} does not exist"
        for path in (parent / "none", state / "none")
    ]


def test_a_cold_file_that_is_too_small_is_found(point: Path) -> None:
    path = point.parent / "cold"
    path.write_bytes(bytes(4096))
    (text,) = found(config(point, ColdConfig(path=path)))
    assert text == f"cold {path}: must have at least 16.0 MiB"


def test_a_cold_path_that_leads_nowhere_is_found(point: Path) -> None:
    path = point.parent / "cold"
    path.symlink_to(point.parent / "none")
    (text,) = found(config(point, ColdConfig(path=path, size_bytes=16 * MIB)))
    assert text == f"cold {path}: is a link to what does not exist"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mount", "log file {}: is a directory"),
        ("none/log", "log file {}: the directory {.parent} does not exist"),
        # A start opens the log before it makes its state directory.
        ("state/deep/log", "log file {}: the directory {.parent} does not exist"),
        ("file/log", "directory of the log file {.parent}: {.parent} is not a directory"),
        ("file/x/log", "log file {}: the directory {.parent} does not exist"),
    ],
)
def test_a_log_file_that_cannot_be_opened_is_found(point: Path, name: str, reason: str) -> None:
    (point.parent / "file").touch()
    path = point.parent / name
    assert found(config(point, log=path)) == [reason.format(path, path)]


@pytest.mark.parametrize("name", ["file", "new", "/dev/null"])
def test_a_log_file_that_can_be_opened_is_no_problem(point: Path, name: str) -> None:
    (point.parent / "file").touch()
    assert found(config(point, log=point.parent / name)) == []


def test_where_the_kernel_shows_its_own_nothing_can_be_made(point: Path) -> None:
    cold = ColdConfig(path=Path("/proc/cold"), size_bytes=16 * MIB)
    wanted = replace(config(point, cold, log=Path("/proc/log")), state=Path("/proc/x"))
    kernels = "nothing can be made in /proc, which is proc"
    reasons = [text for text in found(wanted) if kernels in text]
    assert [text.partition(" /")[0] for text in reasons] == [
        "state directory",
        "directory of the log file",
        "directory of cold",
    ]


def test_a_pid_file_that_is_none_is_found(point: Path) -> None:
    pid_file = config(point).state / "daemon.pid"
    pid_file.mkdir(parents=True)
    assert found(config(point)) == [f"state directory {pid_file.parent}: {pid_file} is not a file"]


def test_what_may_not_even_be_looked_at_is_a_problem(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = point.parent / "closed"

    def refuse(path: Path, **_: object) -> os.stat_result:
        if path.is_relative_to(closed) and path != closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.stat(path)

    monkeypatch.setattr(Path, "stat", refuse)
    cold = ColdConfig(path=closed / "a" / "cold", size_bytes=16 * MIB)
    wanted = replace(config(point, cold, log=closed / "a" / "log"), state=closed / "a" / "state")
    assert found(wanted) == [
        f"state directory {closed}/a/state: Permission denied",
        f"log file {closed}/a/log: Permission denied",
        f"cold {closed}/a/cold: Permission denied",
    ]


def test_a_machine_without_fuse_is_told_all_that_helps(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "FUSE_DEVICE", point / "fuse")
    (text,) = check.problems(config(point))
    assert text.startswith(f"{point}/fuse does not exist: load the module with `modprobe fuse`, ")
    assert text.endswith(" or give the container that device")


def test_an_ordinary_users_hot_tier_must_fit_the_shared_memory(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    wanted = replace(config(point), hot=HotConfig(size_bytes=1024 * TIB))
    assert any(text.startswith("the hot tier is to hold") for text in found(wanted))


def test_an_ordinary_user_mounts_on_no_sticky_directory_of_somebody_else(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point.chmod(0o1777)
    user = point.stat().st_uid + 1000
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert any(text.startswith(f"{point}: is sticky and not") for text in found(config(point)))


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
