"""Clients on one host: processes that put and get blocks as they are told, and time each one.

    python -m bench.clients SETTINGS

They are told on standard input and answer on standard output, in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.measures import timed
from bench.samples import Sample, from_durations
from bench.ways import WAYS, Blocks, Way

ROOT = Path(__file__).parents[1]
MARK = "bench: "  # of lines that are answers: libraries write there, too


@dataclass(frozen=True, slots=True)
class Work:
    """What some clients did at once; the clock is the same for all processes of a machine."""

    durations_ns: list[int]
    began_ns: int
    ended_ns: int


def together(works: Sequence[Work]) -> Work:
    """Works that were done at once, as one."""
    return Work(
        [each for work in works for each in work.durations_ns],
        min(work.began_ns for work in works),
        max(work.ended_ns for work in works),
    )


def sample(works: Sequence[Work], size: int) -> Sample:
    """Works that were done one after the other, as one sample."""
    return from_durations(
        [each for work in works for each in work.durations_ns],
        size=size,
        seconds=sum(work.ended_ns - work.began_ns for work in works) / 1e9,
    )


class Team:
    """Some clients on one host. Use as a context manager, or `close` it."""

    def __init__(
        self, inside: Sequence[str], way: str, clients: int, size_max: int, **settings: Any
    ) -> None:
        """`inside`: what a command begins with that runs on that host. `way`: of `WAYS`.

        Raises OSError with what a client says that cannot do its work.
        """
        told = json.dumps({"way": way, "size_max": size_max, "settings": settings})
        command = [*inside, sys.executable, "-m", "bench.clients", told]
        self._clients: list[subprocess.Popen[str]] = []
        try:
            for _ in range(clients):
                self._clients.append(_start(command))
            for client in self._clients:
                _answer(client)
        except BaseException:
            self.close()
            raise

    def begin(self, what: str, names: Sequence[str], size: int, clients: int = 1) -> None:
        """Have the names shared out, and something done for each by so many clients at once."""
        for number, client in enumerate(self._clients[:clients]):
            assert client.stdin is not None
            client.stdin.write(json.dumps([what, size, names[number::clients]]) + "\n")
            client.stdin.flush()

    def end(self, clients: int = 1) -> Work:
        """Wait until they have done it. Raises OSError."""
        answers = [_answer(client) for client in self._clients[:clients]]
        return together([Work(**answer) for answer in answers])

    def do(self, what: str, names: Sequence[str], size: int, clients: int = 1) -> Work:
        """Both."""
        self.begin(what, names, size, clients)
        return self.end(clients)

    def close(self) -> None:
        """End them."""
        for client in self._clients:
            assert client.stdin is not None
            assert client.stdout is not None
            client.kill()
            client.wait()
            client.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                client.stdin.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # Ctrl-C is for who started it
    )


def _answer(client: subprocess.Popen[str]) -> dict[str, Any]:
    assert client.stdout is not None
    while line := client.stdout.readline():
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            if "trouble" in answer:
                raise OSError(answer["trouble"])
            return answer
    raise OSError("a client ended")


def serve(told: str) -> None:
    """Be a client, until there is nothing more to be done."""
    settings = json.loads(told)
    try:
        way: Way = WAYS[settings["way"]](Blocks(settings["size_max"]), **settings["settings"])
        _say({})
        while line := sys.stdin.readline():
            what, way.blocks.size, names = json.loads(line)
            do = getattr(way, what)
            began = time.perf_counter_ns()
            durations = timed(partial(do, name) for name in names)
            ended = time.perf_counter_ns()
            _say({"durations_ns": durations, "began_ns": began, "ended_ns": ended})
    except Exception as error:  # a library of others may raise anything
        _say({"trouble": f"{settings['way']}: {type(error).__name__}: {error}"})
    os._exit(0)  # some libraries take their time with an orderly end


def _say(answer: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
