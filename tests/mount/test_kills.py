"""The process that answers is killed again and again under load: clients wait, and see no error.

CTXFS_KILLS says how often.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mountd import channels
from tests.mount.calls import Pages
from tests.mount.harness import MIB, Daemon, noise, read_or_none, wait_until
from tests.mount.load import (
    ALLOWED,
    STEADY,
    Client,
    Crowd,
    Tally,
    Work,
    check_every_key,
    check_nothing_leaked,
    content,
    total,
)
from tests.mount.test_restart import check_accounting

KILLS = int(os.environ.get("CTXFS_KILLS", "5"))
BETWEEN_S = 1.5  # two kills, at most: also while the next process is not ready yet
CLIENTS = 5
KEYS = 40
IMPATIENT = '[hot]\nroom_wait = "200ms"\n'

# The parent gives up on a daemon that dies so often. Here, that is what it is there for.
PATIENT = """
import sys
from mountd import cli, parent
parent.DEATHS_WITHIN_S = -1.0
sys.exit(cli.main())
"""

LENDS = channels.what_root_lacks() is None and channels.kernel_is_old(os.uname().release) is None

pytestmark = [
    pytest.mark.channel("direct"),
    pytest.mark.timeout(240 + 10 * KILLS),
    pytest.mark.skipif(not LENDS, reason="needs root, and Linux 6.9 or later"),
]


def look_on(path: Path, stop: Callable[[], bool]) -> tuple[float, float]:
    """Hold a mapping and an open file, and compare their bytes all the time.

    Returns the longest that a look at either took, in seconds.
    """
    pages, longest = Pages(path), [0.0, 0.0]
    with open(path, "rb", buffering=0) as file:
        expected = pages.content()
        while not stop():
            started = time.monotonic()
            assert pages.content() == expected, "the mapping has other bytes"
            between = time.monotonic()
            found = os.pread(file.fileno(), len(expected) + 1, 0)
            assert found == expected, "the open file has other bytes"
            longest[0] = max(longest[0], between - started)
            longest[1] = max(longest[1], time.monotonic() - between)
    pages.close()
    return longest[0], longest[1]


def write_on(path: Path, stop: Callable[[], bool]) -> bytes:
    """Write on one block all the time, anywhere in it, and read it back; returns its content."""
    dice = random.Random(1)
    expected = bytearray(dice.randbytes(MIB))
    with open(path, "w+b", buffering=0) as file:
        os.setxattr(file.fileno(), "user.ctx.pin", b"1")  # it is to be there in the end
        while not stop() and not _filled(file.fileno(), expected):
            pass
        while not stop():
            piece = dice.randbytes(dice.randrange(1, 20_000))
            start = dice.randrange(MIB - len(piece))
            assert os.pwrite(file.fileno(), piece, start) == len(piece)
            expected[start : start + len(piece)] = piece
            assert os.pread(file.fileno(), 2 * MIB, 0) == expected
    return bytes(expected)


def _filled(fd: int, content: bytearray) -> bool:
    """Write all of it, which needs room that others may have just now."""
    try:
        return os.pwrite(fd, content, 0) == len(content)
    except OSError as error:
        if error.errno not in ALLOWED:
            raise
        return False


def kill_again_and_again(daemon: Daemon, crowd: Crowd) -> None:
    """Until it was often enough, or a client has failed."""
    dice = random.Random(2)
    for _ in range(KILLS):
        if not crowd.wait(dice.random() * BETWEEN_S):
            return
        daemon.wait_for_successor(daemon.kill_child())
    crowd.wait(BETWEEN_S)


@pytest.mark.parametrize("cold", [None, "192MiB"])
def test_clients_see_no_error_and_no_wrong_byte_while_the_daemon_is_killed(
    tmp_path: Path, channel: str, cold: str | None
) -> None:
    base = tmp_path / "patient"
    base.mkdir()
    daemon = Daemon(base, hot="20MiB", cold=cold, config=IMPATIENT, channel=channel)
    as_module = daemon.command.index("-m")
    daemon.command[as_module : as_module + 2] = ["-c", PATIENT]
    with daemon:
        held = daemon.put(f"{STEADY}-held", content(random.Random(3)))
        daemon.set(held.name, "pin", "1")
        daemon.wait_sealed(held.name)
        written = daemon.mount / f"{STEADY}-written"

        def client(number: int, stop: Callable[[], bool]) -> Tally:
            return Client(daemon.mount, number, keys=KEYS, cold=cold is not None).go_on(stop)

        clients = [partial(client, number) for number in range(CLIENTS)]
        works: list[Work] = [partial(look_on, held), partial(write_on, written), *clients]
        with Crowd(daemon, works) as crowd:
            kill_again_and_again(daemon, crowd)
            (mapped_s, open_s), expected, *tallies = crowd.stop()
        tally = total(tallies)
        sys.stdout.write(f"{KILLS} kills; longest look at a mapping {mapped_s:.3f} s, ")
        sys.stdout.write(f"at an open file {open_s:.3f} s\n")
        assert all(tally.done.values())
        # Just now everything in memory was in use, which is a miss; it ends with its users.
        wait_until(lambda: read_or_none(written) is not None)
        assert written.read_bytes() == expected
        written.unlink()
        check_all_is_well(daemon)
        assert daemon.log().count("Traceback") == 0


def check_all_is_well(daemon: Daemon) -> None:
    """Every byte that is there, and nothing that should not be; and it goes on working."""
    assert daemon.stats()["counters"]["corrupt"] == 0
    check_every_key(daemon)
    check_nothing_leaked(daemon)
    check_accounting(daemon)
    for path in daemon.mount.iterdir():
        path.unlink()
    check_nothing_leaked(daemon)
    check_accounting(daemon)
    daemon.put("after", noise(4, MIB))
    daemon.wait_sealed("after")
    assert (daemon.mount / "after").read_bytes() == noise(4, MIB)
