"""`--daemon`: the starter waits for the mount or for the reason it does not come."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STARTER = """
import os, sys
from pathlib import Path
from mountd import background

def work(announce):
    {work}
    return 0

sys.exit(background.detach(work, lambda error: f"told: {{error}}", {error_file}))
"""


def started(work: str, error_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Reading to the end of both pipes shows as well that the daemon let go of them."""
    shown = "None" if error_file is None else f"Path({str(error_file)!r})"
    script = STARTER.format(work=work, error_file=shown)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_starter_returns_when_the_mount_answers_and_the_daemon_stays(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    facts = "f'{os.getcwd()} {os.getsid(0) == os.getpid()} {os.readlink(\"/proc/self/fd/1\")}'"
    done = started(f"announce('it answers'); open({str(fifo)!r}, 'w').write({facts})")
    # The daemon still waits for a reader of the fifo, and its starter has returned.
    assert (done.returncode, done.stdout, done.stderr) == (0, "it answers\n", "")
    assert fifo.read_text() == "/ True /dev/null"


def test_a_failure_reaches_the_starter_with_its_status() -> None:
    done = started("raise SystemExit(5)")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == "told: 5\n"


def test_a_silent_end_is_said() -> None:
    done = started("return 3")
    assert done.returncode == 3
    assert done.stderr == "the daemon ended with status 3 before the mount answered\n"


def test_a_killed_daemon_is_said() -> None:
    done = started("os.kill(os.getpid(), 9)")
    assert done.returncode == 1
    assert done.stderr == "the daemon was ended by signal 9 before the mount answered\n"


@pytest.mark.parametrize("existing", ["", "before\n"])
def test_standard_error_goes_to_the_log_file(tmp_path: Path, existing: str) -> None:
    path = tmp_path / "log"
    path.write_text(existing)
    done = started("print('seen', file=sys.stderr); announce('up')", path)
    assert done.stdout == "up\n"
    assert path.read_text() == existing + "seen\n"


DAEMON = """
import sys, types
from mountd import check, cli

def serve(config, ready, fuse_fd):
    ready()
    with open(sys.argv[1], "w") as fifo:
        fifo.write((config.state / "daemon.pid").read_text())
    return 0

sys.modules["mountd.run"] = types.ModuleType("mountd.run")
sys.modules["mountd.run"].serve = serve
check._fuse = lambda config: iter(())
sys.exit(cli.main(sys.argv[2:]))
"""


def test_the_announced_daemon_is_the_one_in_the_pid_file(tmp_path: Path) -> None:
    fifo, point = tmp_path / "fifo", tmp_path / "mount"
    os.mkfifo(fifo)
    point.mkdir()
    command = [sys.executable, "-c", DAEMON, str(fifo), "--daemon", "--hot=64MiB"]
    command += ["--channel=pyfuse3", "mount"]  # with no parent
    done = subprocess.run(
        [*command, "--state", "state"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid = fifo.read_text().strip()
    assert done.stdout.startswith(f"ctxfs: {point} is mounted (hot 64.0 MiB, no cold tier, ")
    assert done.stdout.endswith(f", pid {pid})\n")


def test_a_log_file_that_cannot_be_opened_is_told_once_by_the_starter(tmp_path: Path) -> None:
    done = started("return 0", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"told: log file {tmp_path}: Is a directory\n"
