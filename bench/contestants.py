"""Who shares blocks between hosts: daemons, with TLS or without, iperf3, Redis, Mooncake's store.

All do the same: a block that is on one other host alone is got whole; a block is put until it is on
two hosts. The first pass for each sample does not count: the memory that it needs may have been
given back to the hypervisor while others had their turn.

What a pass makes, others remove, untimed. Daemons are measured with hot tiers that are full, as
these are in use: what comes is received into the memory of what leaves. So there the oldest goes by
itself, also on the host that blocks come from, long after it was read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bench.clients import Team, Work, sample, together
from bench.members import Cluster
from bench.network import Network
from bench.samples import Sample
from bench.servers import iperf

HOSTS: Final = ("n1", "n2", "n3", "n4")
NEAR, FAR = HOSTS[:2]  # where blocks are got and put, and where they come from
# Who reads from whom: the more members read at once, the more of them are read from.
RING: Final = (("n1", "n2"), ("n3", "n4"), ("n2", "n3"), ("n4", "n1"))
CLIENTS_MAX: Final = 4
HOT_PASSES: Final = 4  # whose blocks fill a hot tier
IPERF_BYTES_PER_S: Final = 2_000_000_000  # a guess at what it sends, for the time that it takes


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done for one sample. `at_once`: clients, or members that read."""

    size: int
    blocks: int
    seconds: float
    at_once: int

    def passes(self, one: Callable[[], Work]) -> Sample:
        """Passes until their time is up, after one that does not count."""
        one()
        works: list[Work] = []
        while (
            sum(work.ended_ns - work.began_ns for work in works) < self.seconds * 1e9 or not works
        ):
            works.append(one())
        return sample(works, self.size)


class Contestant(Protocol):
    """What is done by it, or None where it does not do that."""

    name: str

    def get(self, task: Task) -> Sample | None:
        """Get blocks from the far host."""

    def put(self, task: Task) -> Sample | None:
        """Put blocks on both hosts."""

    def read_on_members(self, task: Task) -> Sample | None:
        """Get blocks on several hosts at once, each from another one."""


class Daemons:
    """Ours. `alone`: a cluster that keeps a block once; `twice`: one that keeps it twice. Teams by
    the hosts whose mounts they use.
    """

    def __init__(
        self,
        name: str,
        alone: tuple[Cluster, Mapping[str, Team]] | None,
        twice: tuple[Cluster, Team] | None = None,
    ) -> None:
        self.name = name
        self._alone = alone
        self._twice = twice
        self._full: set[tuple[str, str]] = set()  # by the hosts of which one read from the other
        self._has_put = False

    def get(self, task: Task) -> Sample | None:
        self._fill(task, [(NEAR, FAR)])
        return task.passes(lambda: self._read(task, [(NEAR, FAR)], task.at_once))

    def read_on_members(self, task: Task) -> Sample | None:
        if self._alone is None or len(self._alone[0].names) < len(HOSTS):
            return None
        pairs = RING[: task.at_once]
        self._fill(task, pairs)
        return task.passes(lambda: self._read(task, pairs, 1))

    def _fill(self, task: Task, pairs: Sequence[tuple[str, str]]) -> None:
        if empty := [pair for pair in pairs if pair not in self._full]:
            for _ in range(HOT_PASSES + 1):
                self._read(task, empty, 1)
            self._full.update(empty)

    def _read(self, task: Task, pairs: Sequence[tuple[str, str]], clients: int) -> Work:
        assert self._alone is not None
        cluster, teams = self._alone
        names = {reader: cluster.fresh(task.blocks, home) for reader, home in pairs}
        for reader, home in pairs:
            for what in ("prepare", "settle"):
                teams[home].do(what, names[reader], task.size)
        for reader, _ in pairs:
            teams[reader].begin("get", names[reader], task.size, clients)
        return together([teams[reader].end(clients) for reader, _ in pairs])

    def put(self, task: Task) -> Sample | None:
        if self._twice is None:
            return None
        cluster, team = self._twice

        def one() -> Work:
            return team.do("put", cluster.fresh(task.blocks), task.size, task.at_once)

        if not self._has_put:
            self._has_put = True
            for _ in range(HOT_PASSES):
                one()
        return task.passes(one)


class Others:
    """Redis, or Mooncake's store."""

    def __init__(self, name: str, team: Team) -> None:
        self.name = name
        self._team = team
        self._numbers = itertools.count()

    def get(self, task: Task) -> Sample | None:
        return task.passes(lambda: self._pass(task, ("prepare", "settle"), "get"))

    def put(self, task: Task) -> Sample | None:
        return task.passes(lambda: self._pass(task, (), "put"))

    def _pass(self, task: Task, before: Sequence[str], timed: str) -> Work:
        names = [f"block-{next(self._numbers)}" for _ in range(task.blocks)]
        for what in before:
            self._team.do(what, names, task.size)
        work = self._team.do(timed, names, task.size, task.at_once)
        self._team.do("drop", names, task.size)
        return work

    def read_on_members(self, task: Task) -> Sample | None:
        return None


class Iperf:
    """The yardstick: as many connections as daemons have, and bytes of no block."""

    name = "iperf3"

    def __init__(self, network: Network, connections: int, size_min: int) -> None:
        """`size_min`: of blocks that it is compared with. Smaller ones are about latency."""
        self._network = network
        self._connections = connections
        self._size_min = size_min

    def get(self, task: Task) -> Sample | None:
        return self._send(task, [(NEAR, FAR)]) if task.size >= self._size_min else None

    def put(self, task: Task) -> Sample | None:
        return self._send(task, [(FAR, NEAR)])

    def read_on_members(self, task: Task) -> Sample | None:
        return self._send(task, RING[: task.at_once])

    def _send(self, task: Task, pairs: Sequence[tuple[str, str]]) -> Sample:
        wanted = max(task.size, round(task.seconds * IPERF_BYTES_PER_S / len(pairs)))
        return iperf(self._network, pairs, connections=self._connections, bytes_each=wanted)
