"""The parent of the process that answers: what it does when that one ends, however it ends."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mountd import cli, device_fuse, replace
from tests.mount.harness import Actor, Daemon, children, is_mounted, kill_and_wait, wait_until

pytestmark = pytest.mark.channel("direct")
LONGEST_S = 60

SUPERVISE = """
import os, sys
from pathlib import Path
from mountd import parent
point, state, kept, *command = sys.argv[1:]
if kept:  # as systemd hands over what it has kept
    os.dup2(int(kept), 3)
    told = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "ctxfs-mount"}
    os.environ.update(told)
try:
    status = parent.supervise(
        command,
        point=Path(point),
        state=Path(state),
        announce=lambda line: print(line, flush=True),
    )
except parent.ChildFailed as error:
    print(error, file=sys.stderr)
    status = error.exit_code
sys.exit(status)
"""

CHILD = """
import os, signal, sys
from pathlib import Path
from mountd import child, device_fuse, statedir
given = child.taken()
number = child.restarts()
def mount():
    return device_fuse.mount(
        given.point, fsname="t", allow_other=False, privileged=True, fd=given.fuse_fd)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def wait():
    open(given.state / "go").close()
"""


class Family:
    """A parent with children that do what a test says, and no more."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.point = base / "point"
        self.state = base / "state"
        self.point.mkdir()
        self.state.mkdir(mode=0o700)
        os.mkfifo(self.state / "go")
        self.process: subprocess.Popen[str] | None = None
        self.seen: set[int] = set()

    def start(
        self, does: str, *, kept: int | None = None, notify: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start it with children that do this, after what `CHILD` says."""
        given = [str(self.point), str(self.state), "" if kept is None else str(kept)]
        command = [sys.executable, "-c", CHILD + does]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, *given, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=() if kept is None else (kept,),
            env={**os.environ, **({"NOTIFY_SOCKET": str(notify)} if notify else {})},
        )
        return self.process

    def line(self) -> str:
        """What it announces."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Let a child that waits go on."""
        with open(self.state / "go", "w"):
            pass

    def end(self) -> tuple[int, str]:
        """Its exit status and what it said."""
        assert self.process is not None
        _, errors = self.process.communicate(timeout=LONGEST_S)
        return self.process.returncode, errors

    def child(self) -> int:
        assert self.process is not None
        (found,) = children(self.process.pid)
        return found

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
            for each in children(self.process.pid):
                kill_and_wait(each)
            self.process.kill()
            self.process.communicate()
        while is_mounted(self.point):
            subprocess.run(["umount", "-l", self.point], check=True)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    one = Family(tmp_path)
    yield one
    one.clean()


def test_a_child_that_dies_is_followed_by_the_next_with_the_same_mount(family: Family) -> None:
    family.start(
        "adopted = mount().adopted\n"
        "given.announce(f'{number} {adopted}')\n"
        "if number < 3: die()\n"
        "with open(given.state / 'told', 'w') as file: file.write(f'{number} {adopted}')\n"
        "device_fuse.end(given.point)\n"
    )
    assert family.line() == "0 False"
    status, errors = family.end()
    assert status == 0
    assert (family.state / "told").read_text() == "3 True"
    told = [line.partition(") ")[2] for line in errors.splitlines()]
    assert told == [f"was killed by signal 9; restart {n}" for n in (1, 2, 3)]
    assert not is_mounted(family.point)
    assert sorted(os.listdir(family.state)) == ["go", "told"]


def test_a_crash_loop_ends_the_mount_so_that_clients_get_an_error(family: Family) -> None:
    family.start("mount()\ngiven.announce('up')\nif not number: wait()\nsys.exit(1)\n")
    assert family.line() == "up"

    def ask() -> Iterator[Any]:
        yield None
        try:
            os.stat(family.point / "name")
        except OSError as error:
            yield error.errno

    with Actor(ask) as client:
        client.step()
        client.go()
        wait_until(lambda: "fuse" in Path(f"/proc/{client.pid}/wchan").read_text())
        family.go()
        assert client.answer() in (errno.ENOTCONN, errno.ECONNABORTED)
    status, errors = family.end()
    assert status == 1
    last = errors.splitlines()[-1]
    assert "the daemon died 5 times within " in last
    assert "the last time it ended with status 1" in last
    assert f"{family.point} is unmounted; for the reason see its standard error" in last
    assert not is_mounted(family.point)


@pytest.mark.parametrize("mounts", ["", "mount()\n"])
def test_a_first_start_that_fails_says_why_once_and_ends_with_its_status(
    family: Family, mounts: str
) -> None:
    family.start(f"{mounts}given.explain('ctx-mountd: no room')\nsys.exit(4)\n")
    assert family.line() == ""
    assert family.end() == (4, "ctx-mountd: no room\n")
    assert not is_mounted(family.point)


def test_a_first_start_that_is_killed_is_said(family: Family) -> None:
    family.start("mount()\ndie()\n")
    said = "ctx-mountd: the daemon was killed by signal 9 before the mount answered\n"
    assert family.end() == (1, said)
    assert not is_mounted(family.point)


def test_an_expected_error_of_a_child_that_was_ready_ends_all(family: Family) -> None:
    family.start("mount()\ngiven.announce('up')\nsys.exit(5)\n")
    status, errors = family.end()
    assert status == 5
    assert "ended with status 5" in errors
    assert not is_mounted(family.point)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_is_passed_on_and_the_status_returned(
    family: Family, number: signal.Signals
) -> None:
    process = family.start(
        f"mount()\nsignal.signal({number.value}, lambda *_: sys.exit(7))\n"
        "given.announce('up')\nsignal.pause()\n"
    )
    assert family.line() == "up"
    process.send_signal(number)
    assert family.end() == (7, "")
    assert not is_mounted(family.point)


def test_other_processes_get_neither_the_mount_nor_the_pipes(family: Family) -> None:
    # posix_spawn closes nothing by itself: what is seen is what would leak.
    family.start(
        "mount()\n"
        "flags = os.O_CREAT | os.O_WRONLY\n"
        "out = (os.POSIX_SPAWN_OPEN, 1, str(given.state / 'fds'), flags, 0o600)\n"
        "pid = os.posix_spawn('/bin/ls', ['ls', '-l', '/proc/self/fd'], os.environ,"
        " file_actions=[out])\n"
        "os.waitpid(pid, 0)\n"
        "given.announce('up')\ndevice_fuse.end(given.point)\n"
    )
    assert family.end()[0] == 0
    links = [line.split(" -> ")[1] for line in (family.state / "fds").read_text().splitlines()[1:]]
    kept = [link for link in links if "pipe" not in link and "/proc" not in link]
    assert sorted(kept) == sorted(["/dev/null", str(family.state / "fds")])
    assert len([link for link in links if "pipe" in link]) == 1  # standard error


# -- systemd, played by a socket


@contextmanager
def manager(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(LONGEST_S)
        yield sock


def heard(sock: socket.socket) -> tuple[list[str], list[int]]:
    text, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    return text.decode().splitlines(), fds


STAYS = "adopted = mount().adopted\ngiven.announce(f'{number} {adopted}')\nsignal.pause()\n"


def test_systemd_keeps_the_mount_for_the_parent_after_this_one(
    family: Family, tmp_path: Path
) -> None:
    with manager(tmp_path / "notify") as sock:
        process = family.start(STAYS, notify=tmp_path / "notify")
        assert family.line() == "0 False"
        told, (fd,) = heard(sock)
        assert told == ["FDSTORE=1", "FDNAME=ctxfs-mount", "FDPOLL=0"]
        ready = ["READY=1", f"MAINPID={process.pid}", "STATUS=0 False"]
        assert heard(sock) == (ready, [])
        child = os.pidfd_open(family.child())
        process.kill()
        family.end()
        wait_for_end(child)
        assert device_fuse.is_mounted(fd)

        process = family.start(STAYS, kept=fd, notify=tmp_path / "notify")
        os.close(fd)
        assert family.line() == "0 True"
        _, fds = heard(sock)
        heard(sock)
        for each in fds:
            os.close(each)
        process.terminate()
        assert heard(sock)[0][0] == "STOPPING=1"
        assert heard(sock) == (["FDSTOREREMOVE=1", "FDNAME=ctxfs-mount"], [])
        assert family.end()[0] == 128 + signal.SIGTERM
        assert not is_mounted(family.point)


def wait_for_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(LONGEST_S * 1000)
    os.close(pidfd)


def test_a_kept_descriptor_whose_mount_was_ended_is_dropped(family: Family, tmp_path: Path) -> None:
    fd = device_fuse.open_device()
    device = device_fuse.mount(family.point, fsname="t", allow_other=False, privileged=True, fd=fd)
    device_fuse.end(family.point)
    assert not device_fuse.is_mounted(device.fd)
    family.start(STAYS, kept=fd)
    os.close(fd)
    assert family.line() == "0 False"


def test_a_signal_that_comes_while_a_successor_starts_waits_for_it(
    family: Family, tmp_path: Path
) -> None:
    with manager(tmp_path / "notify") as sock:
        process = family.start(
            "if not number:\n    mount()\n    given.announce('up')\n    die()\n"
            "wait()\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            "given.announce('up again')\nsignal.pause()\n",
            notify=tmp_path / "notify",
        )
        assert family.line() == "up"
        with open(family.state / "go", "w"):  # the successor is there
            process.terminate()
            while heard(sock)[0][0] != "STOPPING=1":
                pass
        assert family.end()[0] == 0


# -- replacing

ANSWERS = (
    "broken = (given.state / 'broken').exists()\n"
    "if broken: given.explain('ctx-mountd: hot.size: no'); sys.exit(2)\n"
    "given.wait_for_turn()\n"
    "with statedir.claim(given.state):\n"
    "    adopted = mount().adopted\n"
    "    given.announce(f'{number} {adopted}')\n"
    "    signal.pause()\n"
)


def test_a_successor_takes_over_when_it_is_loaded(family: Family) -> None:
    family.start(ANSWERS)
    assert family.line() == "0 False"
    for _ in range(3):
        old = family.child()
        told = replace.replace(family.state)
        new = family.child()
        assert new != old
        assert told == f"ctxfs: {family.state}: pid {new} answers in place of pid {old}"
    assert is_mounted(family.point)


def test_a_successor_that_does_not_load_leaves_the_old_one_at_work(family: Family) -> None:
    family.start(ANSWERS)
    assert family.line() == "0 False"
    old = family.child()
    (family.state / "broken").touch()
    for _ in range(2):
        with pytest.raises(replace.NotReplaced, match=rf"pid {old} goes on:\nhot\.size: no"):
            replace.replace(family.state)
        assert family.child() == old
    (family.state / "broken").unlink()
    replace.replace(family.state)
    assert family.child() != old


def test_a_daemon_that_is_just_starting_is_not_replaced(family: Family) -> None:
    family.start("wait()\n" + ANSWERS)
    wait_until(lambda: (family.state / "parent.pid").exists())
    with pytest.raises(replace.NotReplaced, match="the daemon goes on:\nit is only just starting"):
        replace.replace(family.state)
    family.go()
    assert family.line() == "0 False"


def ctx_mountd(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mountd.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )


def test_a_configuration_with_a_mistake_is_told_and_replaces_nothing(
    start: Callable[..., Daemon],
) -> None:
    daemon = start()
    toml = daemon.state.parent / "ctxfs.toml"
    toml.write_text("[limits]\ndrain = 'much'\n")
    pid = daemon.pid
    done = ctx_mountd("--replace", "--state", daemon.state)
    assert done.returncode == 1
    assert f"ctx-mountd: not replaced, pid {pid} goes on:" in done.stderr
    assert f"ctx-mountd: {toml}" in done.stderr
    assert daemon.put("still", b"alive").read_bytes() == b"alive"
    assert daemon.stats()["pid"] == daemon.pid == pid


def test_where_there_is_no_daemon_none_is_replaced(tmp_path: Path) -> None:
    done = ctx_mountd("--replace", "--state", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no daemon has this state directory" in done.stderr


def test_the_daemon_of_another_channel_is_not_replaced(start: Callable[..., Daemon]) -> None:
    daemon = start(channel="pyfuse3")
    done = ctx_mountd("--replace", "--state", daemon.state)
    assert done.returncode == 2
    assert f"the daemon with pid {daemon.pid} does not use the direct channel" in done.stderr
    assert daemon.stats()["parent_pid"] is None


# -- with the real daemon


def test_the_daemon_ends_with_its_parent_and_nothing_stays(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    pid = hot_only.pid
    stats = hot_only.stats()
    assert (stats["pid"], stats["parent_pid"]) == (pid, hot_only.process.pid)
    assert stats["restarts"] == 0
    assert hot_only.stop() == 0
    assert not is_mounted(hot_only.mount)
    assert not is_mounted(hot_only.state / "hot")
    assert not os.path.exists(f"/proc/{pid}")
    assert os.listdir(hot_only.state) == []


def test_ctrl_c_in_a_terminal_ends_all_of_it_cleanly(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    pid = hot_only.pid
    assert os.getpgid(pid) != os.getpgid(hot_only.process.pid)
    hot_only.process.send_signal(signal.SIGINT)
    assert hot_only.process.wait(LONGEST_S) == 0
    assert not is_mounted(hot_only.mount)
    assert not os.path.exists(f"/proc/{pid}")
    assert "Traceback" not in hot_only.log()


def test_when_the_parent_is_killed_the_daemon_ends_and_unmounts(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    child = os.pidfd_open(hot_only.pid)
    hot_only.put("block", b"content")
    hot_only.process.kill()
    wait_for_end(child)
    assert not is_mounted(hot_only.mount)
    assert not is_mounted(hot_only.state / "hot")
    assert "ending: SIGTERM" in hot_only.log()


def test_a_killed_daemon_is_followed_by_another(hot_only: Daemon) -> None:
    old = hot_only.kill_child()
    new = hot_only.wait_for_successor(old)
    assert new != old
    assert not os.path.exists(f"/proc/{old}")
    assert f"the daemon (pid {old}) was killed by signal 9; restart 1" in hot_only.log()
    hot_only.kill()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(hot_only.mount)


def test_ending_the_process_that_answers_ends_the_mount(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    os.kill(hot_only.pid, signal.SIGTERM)
    assert hot_only.process.wait(LONGEST_S) == 0
    assert not is_mounted(hot_only.mount)


def test_in_the_background_relative_paths_mean_what_they_meant_to_the_starter(
    tmp_path: Path,
) -> None:
    (tmp_path / "ctx").mkdir()
    (tmp_path / "c.toml").write_text("[hot]\nsize = '16MiB'\n")
    words = ["--daemon", "-c", "c.toml", "--state", "state", "--cold", "cold:64MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "mountd.cli", *words, "--channel=direct", "ctx"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=LONGEST_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid = int((tmp_path / "state/daemon.pid").read_text())
    assert done.stdout.endswith(f"channel direct, pid {pid})\n")
    parent = os.pidfd_open(int((tmp_path / "state/parent.pid").read_text()))
    ctx = shutil.which("ctx", path=os.path.dirname(sys.executable)) or "ctx"
    subprocess.run([ctx, "umount", tmp_path / "ctx"], check=True)
    wait_for_end(parent)
    assert not os.path.exists(f"/proc/{pid}")
    assert not is_mounted(tmp_path / "ctx")


def test_in_the_background_a_failed_start_is_told_once_by_the_starter(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start()
    other = tmp_path / "other"
    other.mkdir()
    done = ctx_mountd("--daemon", "--channel=direct", "--state", daemon.state, other)
    assert done.returncode == 2
    assert done.stderr == (
        f"ctx-mountd: {daemon.state} belongs to the daemon with pid {daemon.pid}; "
        "give this mount a --state of its own\n"
    )


def test_a_command_for_children_means_the_same_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-c", "a.toml", "--state=s", "--hot", "1GiB", "--cold", "c:1GiB", "--cold=d"]
    words += ["--channel", "direct", "--format", "-o", "fsname=-x", "--log-level=debug", "p"]
    arguments = cli.parser().parse_args(words)
    command = cli.command(arguments)
    module = command.index("mountd.cli")
    again = vars(cli.parser().parse_args(command[module + 1 :]))
    assert again == vars(arguments) | {
        "mountpoint": f"{tmp_path}/p",
        "config": f"{tmp_path}/a.toml",
        "state": f"{tmp_path}/s",
        "cold": [f"{tmp_path}/c:1GiB", f"{tmp_path}/d"],
    }


# -- the next daemon goes on with the mount


def test_a_client_of_a_killed_daemon_waits_for_the_next_one(hot_only: Daemon) -> None:
    path = hot_only.put("block", b"content")
    hot_only.wait_sealed("block")
    with open(path, "rb") as file:
        old = hot_only.kill_child()
        assert path.read_bytes() == b"content"
        assert hot_only.pid != old
        assert file.read() == b"content"
    stats = hot_only.stats()
    assert (stats["pid"], stats["restarts"]) == (hot_only.pid, 1)
    assert hot_only.stop() == 0
    assert not is_mounted(hot_only.mount)
    assert os.listdir(hot_only.state) == []


def test_a_replaced_daemon_is_noticed_by_nobody(hot_only: Daemon) -> None:
    path = hot_only.put("block", b"content")
    hot_only.wait_sealed("block")
    old = hot_only.pid
    with open(path, "rb") as file:
        done = ctx_mountd("--replace", "--state", hot_only.state)
        assert (done.returncode, done.stderr) == (0, "")
        new = hot_only.pid
        assert done.stdout == f"ctxfs: {hot_only.state}: pid {new} answers in place of pid {old}\n"
        assert new != old
        assert file.read() == path.read_bytes() == b"content"
    assert hot_only.stats()["restarts"] == 0
    assert hot_only.stop() == 0


def test_a_configuration_that_changed_does_not_move_the_mount(hot_only: Daemon) -> None:
    toml = hot_only.state.parent / "ctxfs.toml"
    toml.write_text('[mount]\nchannel = "pyfuse3"\n[defaults]\nttl = "1h"\n')
    done = ctx_mountd("--replace", "--state", hot_only.state)
    assert (done.returncode, done.stderr) == (0, "")
    assert hot_only.channel == "direct"
    hot_only.put("block", b"content")
    assert float(hot_only.get("block", "ttl")) > 3500


def test_a_daemon_that_is_killed_again_and_again_is_given_up(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    for number in range(5):
        assert hot_only.stats()["restarts"] == number
        hot_only.kill_child()
    assert hot_only.process.wait(LONGEST_S) == 1
    assert f"{hot_only.mount} is unmounted" in hot_only.log()
    assert not is_mounted(hot_only.mount)


def test_a_mount_whose_session_is_lost_is_ended(hot_only: Daemon) -> None:
    assert hot_only.process is not None
    hot_only.process.send_signal(signal.SIGSTOP)  # no successor comes before the file is gone
    hot_only.kill_child()
    (hot_only.state / "hot/session").unlink()
    hot_only.process.send_signal(signal.SIGCONT)
    assert hot_only.process.wait(LONGEST_S) == 2
    assert "the mount cannot be taken over" in hot_only.log()
    assert not is_mounted(hot_only.mount)
