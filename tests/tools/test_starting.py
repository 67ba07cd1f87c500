"""`ctx mount` and `ctx umount`, with stand-ins for the daemon and the mount table."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.conftest import Run
from tests.tools.fakemount import STATS, FakeMount
from tools import _mounts, umount
from tools import mount as mount_command
from tools._common import Mount, ToolError
from tools._mounts import Mounted

# Ends on SIGTERM, as the daemon does; its command line has the daemon's name in it.
STAND_IN = "import signal, sys; sys.stdout.write('up'); sys.stdout.flush(); signal.pause()"


@pytest.mark.parametrize(
    ("words", "point", "arguments"),
    [
        (["/ctx"], "/ctx", ["--daemon", "/ctx"]),
        (["f.toml", "/ctx"], "/ctx", ["--daemon", "-c", "f.toml", "/ctx"]),
        (["/ctx", "--hot", "4GiB"], "/ctx", ["--daemon", "--hot", "4GiB", "/ctx"]),
        (["f", "/ctx", "--format"], "/ctx", ["--daemon", "-c", "f", "--format", "/ctx"]),
    ],
)
def test_words_become_the_daemons_command_line(
    words: list[str], point: str, arguments: list[str]
) -> None:
    assert mount_command.daemon_command(words) == (point, arguments)


def test_third_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(ToolError, match="not expected here"):
        mount_command.daemon_command(["a", "b", "c"])


@pytest.mark.parametrize("code", [0, 2])
def test_mount_answers_with_the_daemons_exit_code(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    log = tmp_path / "log"
    script = f"import sys; open({str(log)!r}, 'w').write(' '.join(sys.argv[1:])); sys.exit({code})"
    monkeypatch.setattr(mount_command, "find_daemon", lambda: [sys.executable, "-c", script])
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    answer = run("mount", "--json", str(mount.path), "--hot", "1GiB")
    assert answer.code == code
    assert log.read_text() == f"--daemon --hot 1GiB {mount.path}"
    if code == 0:
        assert answer.json == {"mount": str(mount.path), "pid": STATS["pid"]}


def test_daemon_is_the_one_installed_beside_ctx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = tmp_path / "ctx-mountd"
    daemon.write_text("#!/bin/sh\n")
    daemon.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "ctx")])
    assert mount_command.find_daemon() == [str(daemon)]


@pytest.fixture
def daemon(mount: FakeMount) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STAND_IN, "ctx-mountd"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == b"up"
    mount.write_stats(STATS | {"pid": process.pid})
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class Table:
    """A mount table with one mount, which goes when its daemon ends or something takes it."""

    def __init__(self, point: Path, daemon: subprocess.Popen[bytes] | None) -> None:
        self.point = point
        self.daemon = daemon
        self.taken = False

    def mounted(self) -> list[Mounted]:
        gone = self.taken or (self.daemon is not None and self.daemon.poll() is not None)
        return [] if gone else [Mounted(str(self.point), "0:9999", "rw")]


def test_umount_asks_the_daemon_and_waits_until_it_is_gone(
    mount: FakeMount,
    run: Run,
    daemon: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_mounts, "mounted", Table(mount.path, daemon).mounted)
    answer = run("umount", "--json", str(mount.path))
    assert answer.code == 0
    assert answer.json == {"mount": str(mount.path), "unmounted": True, "pid": daemon.pid}
    assert daemon.wait() == -signal.SIGTERM


def test_umount_of_a_mount_in_use_names_who_uses_it(
    mount: FakeMount,
    run: Run,
    daemon: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_mounts, "mounted", Table(mount.path, daemon).mounted)
    user = subprocess.Popen(["cat"], cwd=mount.path, stdin=subprocess.PIPE)
    try:
        answer = run("umount")
        assert answer.code == 1
        assert f"is in use by cat (pid {user.pid})" in answer.err
        assert daemon.poll() is None
        assert run("umount", "-f").code == 0
    finally:
        user.communicate()


def test_umount_of_a_stale_mount_takes_it_away(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(mount.path, None)
    (mount.path / ".ctx" / "stats").unlink()
    taken = []

    def detach(place: Mount, *, lazily: bool) -> None:
        taken.append((place.point, lazily))

    monkeypatch.setattr(_mounts, "mounted", table.mounted)
    monkeypatch.setattr(umount, "detach", detach)
    answer = run("umount", "--json")
    assert answer.json["pid"] is None
    assert taken == [(str(mount.path), False)]


def test_umount_of_what_is_no_mount_is_not_found(mount: FakeMount, run: Run) -> None:
    assert run("umount", str(mount.path)).code == 3


def test_open_file_and_mapping_count_as_use(tmp_path: Path) -> None:
    block = tmp_path / "ctx" / "k"
    block.parent.mkdir()
    block.write_bytes(b"x" * 4096)
    script = (
        "import mmap, os, sys\n"
        f"fd = os.open({str(block)!r}, os.O_RDWR)\n"
        "kept = mmap.mmap(fd, 4096)\n"
        "os.close(fd)\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert user.stdout is not None
        assert user.stdout.readline() == b"up\n"
        found = [each.pid for each in umount.users_of(Mount(str(block.parent)))]
        # mmap keeps a descriptor of its own in Python; either way the process is found.
        assert found == [user.pid]
    finally:
        user.communicate()


def test_pid_of_another_program_is_not_taken_for_the_daemon(mount: FakeMount) -> None:
    mount.write_stats(STATS | {"pid": os.getpid()})
    assert umount.daemon_of(Mount(str(mount.path))) == (None, None)


def test_statistics_that_never_come_are_none(mount: FakeMount) -> None:
    stats = mount.path / ".ctx" / "stats"
    stats.unlink()
    os.mkfifo(stats)  # opening it waits for a writer that never comes
    assert umount.read_stats(Mount(str(mount.path)), timeout_s=0.1) is None
