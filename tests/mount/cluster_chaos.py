"""A cluster of real daemons on a real network with a real etcd, and what can happen to them.

All that is chosen follows from a seed, but for how long things take.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.etcd_server import EtcdServer
from tests.mount.cluster_load import EVERYBODY, SHARED_KEYS, Client, Report, check
from tests.mount.cluster_times import Trouble, table
from tests.mount.harness import Daemon, wait_until
from tests.network import Network

PORT: Final = 7440
REPLICAS: Final = 2
# No call of a client takes longer, whatever happens, than this and what a daemon takes to start.
CALL_S: Final = 10.0
HANG_S: Final = 30.0  # from then on, until it is taken for hung
CALM_S: Final = 40.0  # until all is as it should be, once the troubles are over
# A daemon that dies five times within a minute is ended for good (mountd/parent.py): that a member
# stays within this is no concern here, so it is not driven there.
KILLS_MAX: Final = 3
KILLS_WITHIN_S: Final = 65.0
SUCCESSOR_S: Final = 3.0  # about: until the next process of a member answers


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
        self._kills = {name: deque([-math.inf], KILLS_MAX) for name in names}
        self.troubles: list[Trouble] = []  # all that were made
        self.longest_start_s = 0.0

    def __enter__(self) -> Chaos:
        with ExitStack() as stack:
            self.network = stack.enter_context(Network(self.names))
            self.etcd = EtcdServer(self._base, host=self.network.host)
            stack.enter_context(self.etcd)
            for name in self.names:
                daemon = self._daemon(name)
                stack.enter_context(_nothing_beneath(daemon.mount))
                self.daemons[name] = stack.enter_context(daemon)
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
            f'replicas = {REPLICAS}\netcd = ["{self.etcd.endpoint}"]\nlease = "2s"\n'
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
                self._over(each[1])
            yield
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def _say(self, what: str) -> None:
        sys.stdout.write(f"{time.time():.3f} {time.monotonic() - self._began:7.2f} {what}\n")

    def _is_going_on(self, what: str) -> bool:
        return any(what == each[1] for each in self._ends)

    def _note(self, kind: str, what: str, *members: str) -> None:
        self.troubles.append(Trouble(kind, what, frozenset(members), time.time()))

    def _over(self, what: str) -> None:
        for trouble in self.troubles:
            if trouble.what == what:
                trouble.end = min(trouble.end, time.time())

    def _begin(
        self,
        kind: str,
        what: str,
        members: Sequence[str],
        begin: Callable[[], object],
        end: Callable[[], object],
    ) -> None:
        seconds = self._dice.uniform(0.3, 5.0)
        if self._is_going_on(what):
            return
        self._say(f"{what} for {seconds:.1f} s")
        self._note(kind, what, *members)
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
        daemon, kills = self.daemons[name], self._kills[name]
        now = time.monotonic()
        if daemon.process is None or (len(kills) == KILLS_MAX and now - kills[0] < KILLS_WITHIN_S):
            return
        with contextlib.suppress(ProcessLookupError):  # of the one before: the next is starting
            what = f"kill the process of {name} that answers"
            self._note("killed", what, name)
            self._say(f"{what}: {daemon.kill_child()}")
            self.troubles[-1].end = time.time() + SUCCESSOR_S
            kills.append(now)

    def _crash(self) -> None:
        name = self._any()
        daemon = self.daemons[name]
        self._begin("dead", f"death of {name}", [name], daemon.kill, lambda: self._start(name))

    def _start(self, name: str) -> None:
        began = time.monotonic()
        self.daemons[name].start()
        self.longest_start_s = max(self.longest_start_s, time.monotonic() - began)

    def _cut_one_way(self) -> None:
        one, other = self._two()
        network = self.network
        self._begin(
            "cut one way",
            f"cut from {one} to {other}",
            [one, other],
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

        what = f"cut between {min(one, other)} and {max(one, other)}"
        self._begin("cut both ways", what, [one, other], cut, mend)

    def _unplug(self) -> None:
        name = self._any()
        self._begin(
            "unplugged",
            f"{name} unplugged",
            [name],
            lambda: self.network.unplug(name),
            lambda: self.network.plug(name),
        )

    def _stop_etcd(self) -> None:
        self._begin("no etcd", "no etcd", [], self.etcd.stop, self.etcd.start)

    def _slow(self) -> None:
        name = self._any()
        rate = self._dice.choice((1_000_000, 10_000_000))
        self._begin(
            "slow",
            f"{name} slow",
            [name],
            lambda: self.network.slow(name, rate),
            lambda: self.network.fast(name),
        )

    def _restart_all(self) -> None:
        if self._dice.random() < 0.5:
            return
        self._say("restart of all members")
        for name, daemon in self.daemons.items():
            if daemon.process is not None:
                self._note("restarted", f"restart of {name}", name)
                daemon.stop()
                self._start(name)
                self._over(f"restart of {name}")

    def lose(self, name: str) -> None:
        """A member dies, and its media with it."""
        self._say(f"{name} is lost, with its media")
        daemon = self.daemons[name]
        daemon.kill()
        daemon.clean()
        shutil.rmtree(daemon.state)
        daemon.state.mkdir(mode=0o700)
        daemon.cold_path.unlink()

    def tell_deaths(self, report: Report) -> None:
        """What the clients could not know."""
        for trouble in self.troubles:
            if trouble.kind == "dead":
                for name in trouble.members:
                    report.died(name, trouble.begin)

    def times(self, report: Report) -> str:
        """A table: how long it took to avoid members in trouble, and how long reads took."""
        logs = {name: daemon.log() for name, daemon in self.daemons.items()}
        return table(self.names, self.troubles, logs, report.slow_reads)


@contextlib.contextmanager
def _nothing_beneath(mount: Path) -> Iterator[None]:
    """While a member is down, what programs do there has to fail: it would be done for good to a
    directory that the next mount covers."""
    subprocess.run(["chattr", "+i", str(mount)], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(mount)], check=True)


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


def check_calm(chaos: Chaos, report: Report, names: Sequence[str] = ()) -> None:
    """After a while all members agree, or these, and have what there must be."""
    deadline = time.monotonic() + CALM_S
    while complaints := list(_complaints(chaos, report, names or chaos.names)):
        if time.monotonic() > deadline:
            raise AssertionError("\n".join(complaints))
        time.sleep(0.25)


def check_failures(chaos: Chaos, report: Report, count: int) -> None:
    """What all say is on all its homes is still there when a member is lost, media and all; so, one
    after the other, with several. Others are asked through one alone, which is lost next.
    """
    lost, *others = random.Random(chaos.seed).sample(chaos.names, count + 1)
    for reader in others:
        wait_until(lambda: not list(_incomplete(chaos, report)), CALM_S)
        chaos.lose(lost)
        check_calm(chaos, report, [reader])
        chaos.daemons[lost].start()
        chaos.wait_healthy()
        lost = reader


def _incomplete(chaos: Chaos, report: Report) -> Iterator[str]:
    """Blocks of which a member does not say that all homes have them."""
    for key in report.may_be:
        for name in chaos.names:
            with contextlib.suppress(FileNotFoundError):
                reached, wanted = chaos.daemons[name].get(key, "replicas").split("/")
                if reached != wanted or int(wanted) < REPLICAS:
                    yield f"{key}: {reached} of {wanted}, says {name}"


def _complaints(chaos: Chaos, report: Report, names: Sequence[str]) -> Iterator[str]:
    for key, may_be in report.may_be.items():
        whose = key.split("-")[1]
        found = {name: _serial_at(chaos, name, key, whose) for name in names}
        if len(set(found.values())) > 1 or not set(found.values()) <= may_be:
            history = "\n    ".join(report.history.get(whose, [])[-60:])
            stories = "\n    ".join(_stories(chaos, key))
            yield f"{key} is {found}, and may be {may_be}\n    {history}\n    {stories}"
    for number in range(SHARED_KEYS):
        key = f"all-{number}"
        found = {name: _serial_at(chaos, name, key, EVERYBODY) for name in names}
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
