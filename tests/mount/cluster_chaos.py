"""A cluster of real daemons on a real network with a real etcd, and what can happen to them.

All that is chosen follows from a seed, but for how long things take.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.etcd_server import EtcdServer
from tests.mount.cluster_load import EVERYBODY, SHARED_KEYS, Client, Report, check
from tests.mount.harness import Daemon, wait_until
from tests.network import Network

PORT: Final = 7440
CALL_S: Final = 10.0  # no call of a client takes longer, whatever happens
HANG_S: Final = 30.0  # from then on, until it is taken for hung
CALM_S: Final = 40.0  # until all is as it should be, once the troubles are over


class Chaos:
    """Members, their network and etcd. Use as a context manager."""

    def __init__(self, base: Path, names: Sequence[str], channel: str, seed: str) -> None:
        self.names = tuple(names)
        self.seed = seed
        self._base = base
        self._channel = channel
        self._stack = ExitStack()
        self._dice = random.Random(seed)
        self._began = time.monotonic()
        self._ends: list[tuple[float, str, Callable[[], None]]] = []
        self.daemons: dict[str, Daemon] = {}
        self.longest_detection_s = 0.0

    def __enter__(self) -> Chaos:
        with ExitStack() as stack:
            self.network = stack.enter_context(Network(self.names))
            self.etcd = EtcdServer(self._base, host=self.network.host)
            stack.enter_context(self.etcd)
            for name in self.names:
                self.daemons[name] = stack.enter_context(self._daemon(name))
            self._stack = stack.pop_all()
        self.wait_healthy()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _daemon(self, name: str) -> Daemon:
        room = self._base / name
        room.mkdir()
        config = (
            f'[cluster]\nid = "chaos"\nname = "{name}"\nlisten = "0.0.0.0:{PORT}"\n'
            f'advertise = "{self.network.address(name)}:{PORT}"\ninsecure = true\n'
            f'replicas = 2\netcd = ["{self.etcd.endpoint}"]\nlease = "2s"\n'
            'etcd_deadline = "1s"\n'
        )
        return Daemon(
            room,
            config=config,
            channel=self._channel,
            hot="32MiB",
            cold="64MiB",
            run_as=self.network.inside(name),
        )

    # -- what members say

    def peers(self, name: str) -> dict[str, dict[str, Any]]:
        """What one member tells of the others it knows."""
        told = json.loads((self.daemons[name].mount / ".ctx/peers").read_text())
        return {each["name"]: each for each in told["members"] if not each["self"]}

    def healthy(self, name: str) -> set[str]:
        """The others that one member takes for live and answering."""
        return {
            other
            for other, each in self.peers(name).items()
            if each["peer"] and each["peer"]["health"] == "healthy" and each["state"] == "live"
        }

    def wait_healthy(self) -> None:
        """Until all members see all others."""
        every = set(self.names)
        wait_until(lambda: all(self.healthy(name) == every - {name} for name in self.names), CALM_S)

    # -- troubles

    def trouble(self, seconds: float) -> Iterator[None]:
        """Make trouble for so long, and end all of it; yields now and then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._dice.choice(
                (
                    self._kill_child, self._kill_child, self._crash, self._cut_one_way,
                    self._cut_both, self._unplug, self._unplug, self._stop_etcd, self._slow,
                    self._restart_all,
                )
            )()  # fmt: skip
            yield from self._pass(self._dice.uniform(0.2, 2.0))
        yield from self._pass(0.0, all_of_it=True)

    def _pass(self, seconds: float, *, all_of_it: bool = False) -> Iterator[None]:
        until = time.monotonic() + seconds
        while True:
            due = [each for each in self._ends if all_of_it or each[0] <= time.monotonic()]
            for each in due:
                self._ends.remove(each)
                self._say(f"end of {each[1]}")
                each[2]()
            yield
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def _say(self, what: str) -> None:
        sys.stdout.write(f"{time.time():.3f} {time.monotonic() - self._began:7.2f} {what}\n")

    def _is_going_on(self, what: str) -> bool:
        return any(what == each[1] for each in self._ends)

    def _begin(self, what: str, begin: Callable[[], object], end: Callable[[], object]) -> None:
        seconds = self._dice.uniform(0.3, 5.0)
        if self._is_going_on(what):
            return
        self._say(f"{what} for {seconds:.1f} s")
        begin()
        self._ends.append((time.monotonic() + seconds, what, lambda: (end(), None)[1]))

    def _any(self) -> str:
        return self._dice.choice(self.names)

    def _two(self) -> tuple[str, str]:
        first, second = self._dice.sample(self.names, 2)
        return first, second

    def ended(self) -> list[str]:
        """Members that ended by themselves, which none may."""
        daemons = self.daemons.items()
        return [name for name, each in daemons if each.process and each.process.poll() is not None]

    def _kill_child(self) -> None:
        name = self._any()
        if self.daemons[name].process is not None:
            self._say(f"kill the process of {name} that answers")
            self.daemons[name].kill_child()

    def _crash(self) -> None:
        name = self._any()
        daemon = self.daemons[name]
        self._begin(f"death of {name}", daemon.kill, daemon.start)

    def _cut_one_way(self) -> None:
        one, other = self._two()
        network = self.network
        self._begin(
            f"cut from {one} to {other}",
            lambda: network.cut(one, other),
            lambda: network.mend(one, other),
        )

    def _cut_both(self) -> None:
        one, other = self._two()

        def cut() -> None:
            self.network.cut(one, other)
            self.network.cut(other, one)

        def mend() -> None:
            self.network.mend(one, other)
            self.network.mend(other, one)

        self._begin(f"cut between {min(one, other)} and {max(one, other)}", cut, mend)

    def _unplug(self) -> None:
        name = self._any()
        self._begin(
            f"{name} unplugged", lambda: self.network.unplug(name), lambda: self.network.plug(name)
        )

    def _stop_etcd(self) -> None:
        self._begin("no etcd", self.etcd.stop, self.etcd.start)

    def _slow(self) -> None:
        name = self._any()
        rate = self._dice.choice((1_000_000, 10_000_000))
        self._begin(
            f"{name} slow", lambda: self.network.slow(name, rate), lambda: self.network.fast(name)
        )

    def _restart_all(self) -> None:
        if self._dice.random() < 0.5:
            return
        self._say("restart of all members")
        for daemon in self.daemons.values():
            if daemon.process is not None:
                daemon.stop()
                daemon.start()


class Clients:
    """Processes that use the mounts until they are told to stop. Use as a context manager."""

    def __init__(self, chaos: Chaos, each: int) -> None:
        """`each`: how many on each member."""
        context = multiprocessing.get_context("fork")
        self._stop = context.Event()
        mounts = {
            f"{name}{number}": daemon.mount
            for name, daemon in chaos.daemons.items()
            for number in range(each)
        }
        self.mounts = mounts
        self._members: list[tuple[str, Any, Connection, Any]] = []
        for name in mounts:
            ours, theirs = context.Pipe(duplex=False)
            doing: Any = context.Array("c", 64)
            process = context.Process(target=self._work, args=(name, chaos.seed, doing, theirs))
            process.start()
            theirs.close()
            self._members.append((name, process, ours, doing))

    def _work(self, name: str, seed: str, doing: Any, answer: Connection) -> None:
        def tell(what: str) -> None:
            doing.value = f"{what} {time.time():.3f}".encode()

        try:
            client = Client(self.mounts[name], name, list(self.mounts), seed, tell)
            answer.send((None, client.go_on(self._stop.is_set)))
        except BaseException as error:
            answer.send((f"{time.time():.3f} {type(error).__name__}: {error}", None))
        finally:
            os._exit(0)

    def has_complaint(self) -> bool:
        """Whether one of them ended early."""
        return any(pipe.poll(0) for _, _, pipe, _ in self._members)

    def stop(self) -> Report:
        """Tell them; what all did. Fails with what any of them failed of."""
        self._stop.set()
        members, self._members = self._members, []
        report, complaints = Report(), []
        deadline = time.monotonic() + HANG_S
        for name, process, pipe, doing in members:
            complaint, answer = f"hangs, doing {doing.value.decode()}", None
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    complaint, answer = pipe.recv()
                except EOFError:
                    complaint = f"died, doing {doing.value.decode()}"
                process.join(HANG_S)
            else:
                process.kill()
            if answer is not None:
                report.add(answer)
            else:
                complaints.append(f"client {name}: {complaint}")
        assert not complaints, "\n".join(complaints)
        return report

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for _, process, _, _ in self._members:
            process.join(5)
            process.kill()


def check_calm(chaos: Chaos, report: Report) -> None:
    """After a while all members agree, and have what there must be."""
    deadline = time.monotonic() + CALM_S
    while complaints := list(_complaints(chaos, report)):
        if time.monotonic() > deadline:
            raise AssertionError("\n".join(complaints))
        time.sleep(0.25)


def _complaints(chaos: Chaos, report: Report) -> Iterator[str]:
    for key, may_be in report.may_be.items():
        whose = key.split("-")[1]
        found = {name: _serial_at(chaos, name, key, whose) for name in chaos.names}
        if len(set(found.values())) > 1 or not set(found.values()) <= may_be:
            history = "\n    ".join(report.history.get(whose, [])[-60:])
            stories = "\n    ".join(_stories(chaos, key))
            yield f"{key} is {found}, and may be {may_be}\n    {history}\n    {stories}"
    for number in range(SHARED_KEYS):
        key = f"all-{number}"
        found = {name: _serial_at(chaos, name, key, EVERYBODY) for name in chaos.names}
        if len(set(found.values())) > 1:
            stories = "\n    ".join(_stories(chaos, key))
            yield f"{key} is {found}: members do not agree\n    {stories}"


def _stories(chaos: Chaos, key: str) -> Iterator[str]:
    for name, daemon in chaos.daemons.items():
        with contextlib.suppress(OSError):
            yield f"{name}: {daemon.get(key, 'story')} {daemon.get(key, 'replicas')}"


def _serial_at(chaos: Chaos, name: str, key: str, whose: str) -> int | str | None:
    path = chaos.daemons[name].mount / key
    try:
        return check(path.read_bytes(), whose, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error.strerror)
