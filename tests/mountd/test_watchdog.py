"""A loop that stands still: who notices, and what is done about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mountd.watchdog import Pulse

TICK_S = 0.05
TICKS = 6

DAEMON = f"""
import logging, os, sys, threading
from functools import partial
import trio
from mountd import watchdog

watchdog.SAYING_S = 1.0
logging.basicConfig(stream=sys.stderr)

def hangs_here():
    sys.stdin.buffer.raw.read(1)

def hangs_in_the_log():
    with logging.getLogger().handlers[0].lock:
        sys.stdin.buffer.raw.read(1)

async def main(way):
    async with trio.open_nursery() as nursery:
        stalled = partial(watchdog.stalled_main, has_heir=sys.argv[2] == "heir")
        nursery.start_soon(partial(watchdog.watched, stalled, tick_s={TICK_S}, ticks_max={TICKS}))
        await trio.sleep({TICK_S * 3})
        print("turns", flush=True)
        if way is None:
            await trio.to_thread.run_sync(sys.stdin.buffer.raw.read, 1)
        else:
            way()
        print("goes on", flush=True)
        nursery.cancel_scope.cancel()

trio.run(main, globals().get(sys.argv[1]))
"""


class Loop:
    """A process with a watched loop, which does something until it is told to end."""

    def __init__(self, way: str, heir: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, way, heir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "turns\n"

    def told(self) -> str:
        """The first line of the log, when it comes."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self) -> tuple[str, str]:
        """What it said since, on both outputs."""
        return self.process.communicate("x", timeout=60)


def test_a_loop_with_an_heir_that_stands_still_is_killed_and_says_where_it_was() -> None:
    loop = Loop("hangs_here", "heir")
    assert loop.process.wait(60) == -signal.SIGKILL
    told = loop.process.stderr.read() if loop.process.stderr else ""
    assert "the loop stands still, and another process takes over" in told
    assert "in hangs_here" in told
    loop.end()


def test_it_is_killed_even_where_the_log_is_what_it_hangs_in() -> None:
    loop = Loop("hangs_in_the_log", "heir")
    assert loop.process.wait(60) == -signal.SIGKILL
    loop.end()


def test_a_loop_without_an_heir_goes_on_and_was_told_of_once() -> None:
    loop = Loop("hangs_here", "alone")
    assert "nobody can take over" in loop.told()
    time.sleep(2 * TICKS * TICK_S)
    out, err = loop.end()
    assert out == "goes on\n"
    assert "stands still" not in err
    assert loop.process.returncode == 0


def test_a_process_that_was_stopped_has_lost_no_time() -> None:
    loop = Loop("nothing", "heir")
    os.kill(loop.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, loop.process.pid, os.WSTOPPED)
    time.sleep(3 * TICKS * TICK_S)
    os.kill(loop.process.pid, signal.SIGCONT)
    assert loop.end() == ("goes on\n", "")
    assert loop.process.returncode == 0


@pytest.mark.parametrize("beats", [(1, 2, 3, 4, 5), (1, 1, 1, 2, 2, 2, 3)])
def test_a_loop_that_turns_at_times_does_not_stand_still(beats: tuple[int, ...]) -> None:
    pulse = Pulse(3)
    for pulse.beats in beats:
        assert not pulse.look()


def test_each_stand_still_is_noticed_once() -> None:
    pulse = Pulse(3)
    seen = []
    for pulse.beats in (1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2):
        seen.append(pulse.look())
    assert seen == [False] * 3 + [True] + [False] * 5 + [True, False]
