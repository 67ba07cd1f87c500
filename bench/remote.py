"""`python -m bench cluster`: blocks on other hosts, which are network namespaces of this one."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from bench import machine, places, report, servers
from bench.clients import Team
from bench.contestants import (
    CLIENTS_MAX,
    FAR,
    HOSTS,
    HOT_PASSES,
    NEAR,
    Contestant,
    Daemons,
    Iperf,
    Others,
    Task,
)
from bench.daemon import check_fuse
from bench.members import PORT, Cluster, Settings, cluster
from bench.network import Network, check_network
from bench.places import CTXFS, IPERF, MOONCAKE, REDIS, TLS
from bench.rounds import Results, Row
from bench.samples import Sample
from ctxfs.units import KIB, MIB

RIVALS: Final = (TLS, IPERF, REDIS, MOONCAKE)
HOT_MIN: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Measure:
    """`at_once`: clients, or members that read. `size`: of a block, where not as asked for."""

    name: str
    what: Literal["get", "put", "read_on_members"]
    at_once: tuple[int, ...]
    size: int | None = None


MEASURES: Final = (
    Measure("remote-get", "get", (1, CLIENTS_MAX)),
    Measure("remote-get-64k", "get", (1,), 64 * KIB),
    Measure("remote-get-4k", "get", (1,), 4 * KIB),
    Measure("remote-put", "put", (1, CLIENTS_MAX)),
    Measure("remote-members", "read_on_members", (1, 2, 4)),
)


def names() -> list[str]:
    """All measures, by the names that `--only` takes."""
    return [measure.name for measure in MEASURES]


def chosen(only: Sequence[str]) -> tuple[Measure, ...]:
    """Those whose names begin with one of `only`; all where it is empty. Raises ValueError."""
    found = tuple(each for each in MEASURES if each.name.startswith(tuple(only) or ""))
    if not found:
        raise ValueError(f"no measure begins so; there are {', '.join(names())}")
    return found


def check_rivals(rivals: Sequence[str]) -> None:
    """Raise ValueError for those that are none."""
    if unknown := set(rivals) - set(RIVALS):
        raise ValueError(f"no rival is {min(unknown)!r}; there are {', '.join(RIVALS)}")


def remote_blocks(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Every chosen measure, by all who are here."""
    measures = chosen(options.only)
    check_rivals(options.rivals)
    check_network()
    check_fuse()
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(places.workroom(options.dir))
        facts = machine.facts(base)
        network = stack.enter_context(Network(HOSTS, bits_per_s=_bits(options.link)))
        scene = _Scene(stack, network, base, options, {each.what for each in measures})
        contestants = scene.contestants(out)
        with out.status("") as status:
            results = _run(measures, contestants, options, status.update)
        daemons = {name: machine.daemon(path) for name, path in scene.mounts.items()}
    report.print_figures(results, out)
    report.print_verdicts(report.verdicts(results), out)
    return {"machine": facts, "daemons": daemons, **report.as_json(results)}


def _bits(gigabits: float | None) -> int | None:
    return None if gigabits is None else int(gigabits * 1e9)


def _run(
    measures: Sequence[Measure],
    contestants: Sequence[Contestant],
    options: argparse.Namespace,
    progress: Callable[[str], None],
) -> Results:
    """All rounds; in each, one right after the other, beginning with another one each time."""
    results = Results()
    for number in range(1, options.rounds + 1):
        for measure in measures:
            for at_once in measure.at_once:
                size = measure.size or options.size
                task = Task(size, options.blocks, options.seconds, at_once)
                for each in contestants:
                    progress(f"round {number} of {options.rounds}: {measure.name}, {each.name}")
                    do: Callable[[Task], Sample | None] = getattr(each, measure.what)
                    if (sample := do(task)) is not None:
                        results.add(Row(measure.name, at_once, each.name), sample)
        contestants = [*contestants[1:], contestants[0]]
    return results


class _Scene:
    """All that runs on the hosts, as far as the measures need it; ended with the stack."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        network: Network,
        base: Path,
        options: argparse.Namespace,
        needed: set[str],
    ) -> None:
        self.mounts: dict[str, Path] = {}
        self._stack = stack
        self._network = network
        self._base = base
        self._options = options
        self._needed = needed
        self._ports = iter(range(PORT, PORT + len(HOSTS)))

    def contestants(self, out: Console) -> list[Contestant]:
        """All that were asked for; for those that cannot be here, the reason is printed."""
        ways: dict[str, Callable[[], Contestant]] = {
            TLS: self._with_tls,
            IPERF: self._iperf,
            REDIS: self._redis,
            MOONCAKE: self._mooncake,
        }
        found: list[Contestant] = [self._ours()]
        for name in self._options.rivals:
            out.print(f"Starting {name}.")
            try:
                found.append(ways[name]())
            except (servers.NotHere, OSError) as error:
                out.print(f"Without {name}: {error}", markup=False)
        return found

    def _ours(self) -> Contestant:
        alone = twice = None
        if self._needed - {"put"}:
            hosts = HOSTS if "read_on_members" in self._needed else (NEAR, FAR)
            alone = self._daemons("alone", hosts, replicas=1)
        if "put" in self._needed:
            made, teams = self._daemons("twice", (NEAR, FAR), replicas=2)
            twice = made, teams[NEAR]
        return Daemons(CTXFS, alone, twice)

    def _with_tls(self) -> Contestant:
        servers.need_program("openssl", "openssl")
        return Daemons(TLS, self._daemons("tls", (NEAR, FAR), replicas=1, secure=True))

    def _daemons(
        self, name: str, hosts: Sequence[str], *, replicas: int, secure: bool = False
    ) -> tuple[Cluster, dict[str, Team]]:
        options = self._options
        settings = Settings(
            name=name,
            replicas=replicas,
            connections=options.connections,
            hot_bytes=max(HOT_MIN, HOT_PASSES * options.size * options.blocks),
            channel=options.channel[0] if options.channel else "auto",
            secure=secure,
            port=next(self._ports),
        )
        made = self._stack.enter_context(cluster(self._network, hosts, self._base / name, settings))
        self.mounts |= {f"{name}-{host}": path for host, path in made.mounts.items()}
        return made, {
            host: self._team(host, "mount", CLIENTS_MAX if host == NEAR else 1, path=str(path))
            for host, path in made.mounts.items()
        }

    def _team(self, host: str, way: str, clients: int = CLIENTS_MAX, **settings: Any) -> Team:
        size_max = max(self._options.size, *(each.size or 0 for each in MEASURES))
        inside = self._network.inside(host)
        return self._stack.enter_context(Team(inside, way, clients, size_max, **settings))

    def _iperf(self) -> Contestant:
        self._stack.enter_context(servers.iperf_servers(self._network, HOSTS, self._base))
        return Iperf(self._network, self._options.connections, self._options.size)

    def _redis(self) -> Contestant:
        told = servers.redis_pair(self._network, NEAR, FAR, self._base)
        return Others(REDIS, self._team(NEAR, "redis", **self._stack.enter_context(told)))

    def _mooncake(self) -> Contestant:
        room = 2 * HOT_PASSES * self._options.size * self._options.blocks
        told = servers.mooncake(self._network, NEAR, FAR, room, self._base)
        return Others(MOONCAKE, self._team(NEAR, "mooncake", **self._stack.enter_context(told)))
