"""Where the microseconds of an `open` and `close` go: in the kernel, in the daemon, in Python."""

import argparse
import contextlib
import json
import os
import pstats
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench import machine, places, report
from bench.daemon import DaemonFailed
from bench.measures import write
from bench.places import Place
from bench.samples import Sample, from_durations
from bench.tracing import NOTHING, Record
from ctxfs.units import MIB

ROOT = Path(__file__).parents[1]
WARM_UP = 200  # opens before those that count
HOT_MIN = 64 * MIB
SEAL_SECONDS_MAX = 10.0
POLL_SECONDS = 0.01

# linux/fuse.h; what is not here is shown by its number
NAMES = {
    NOTHING: "(no request)",
    1: "LOOKUP",
    2: "FORGET",
    3: "GETATTR",
    14: "OPEN",
    15: "READ",
    18: "RELEASE",
    22: "GETXATTR",
    25: "FLUSH",
    42: "BATCH_FORGET",
}


@dataclass(frozen=True, slots=True)
class Client:
    """The two system calls as their caller sees them, and the clock around all of them."""

    opens: list[int]
    closes: list[int]
    begun: int
    ended: int


@dataclass(frozen=True, slots=True)
class Requests:
    """All requests of one kind; medians in microseconds of reading, performing and answering."""

    name: str
    per_open: float
    read_us: float
    perform_us: float
    answer_us: float

    @property
    def total_us(self) -> float:
        """Of one open."""
        return self.per_open * (self.read_us + self.perform_us + self.answer_us)


def where_an_open_goes(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Trace one daemon, and another one with a profiler in it, which makes everything slower."""
    with places.workroom(options.dir) as base:
        facts = machine.facts(base)
        with _traced(base, "plain", options, functions=False) as (place, folder):
            client = _open_and_close(place, options)
            daemon = machine.daemon(place.path)
        records = _records(folder, client)
        with _traced(base, "profiled", options, functions=True) as (place, folder):
            _open_and_close(place, options)
        functions = _functions(folder, options.opens + WARM_UP)[: options.functions]
    calls = {
        "open": from_durations(client.opens, size=0),
        "close": from_durations(client.closes, size=0),
    }
    requests = list(_by_kind(records, options.opens))
    wall_us = (client.ended - client.begun) / 1e3 / options.opens
    _print_calls(calls, wall_us, out)
    _print_requests(requests, out)
    rest_us = wall_us - sum(each.total_us for each in requests)
    out.print(f"{rest_us:,.1f} us of each pair pass outside: in the kernel, asleep, waking up.\n")
    _print_functions(functions, out)
    return {
        "machine": facts,
        "daemon": daemon,
        "wall_us": wall_us,
        "calls": {name: asdict(sample) for name, sample in calls.items()},
        "requests": [{**asdict(each), "total_us": each.total_us} for each in requests],
        "functions": functions,
    }


@contextlib.contextmanager
def _traced(
    base: Path, name: str, options: argparse.Namespace, *, functions: bool
) -> Iterator[tuple[Place, Path]]:
    """A mount of our own whose daemon writes down, in the folder, what went by."""
    folder = base / f"trace-{name}"
    folder.mkdir()
    code = f"import bench.tracing\nbench.tracing.install({str(folder)!r}, functions={functions})\n"
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = ["--channel", places.DIRECT, "--hot", str(max(HOT_MIN, 4 * options.size))]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    with places.own_mount(base, arguments, name=name, environment=environment) as place:
        yield place, folder


def _open_and_close(place: Place, options: argparse.Namespace) -> Client:
    path = place.path / "block"
    write(path, os.urandom(options.size))
    deadline = time.monotonic() + SEAL_SECONDS_MAX
    while os.getxattr(path, "user.ctx.state") != b"sealed":
        if time.monotonic() > deadline:
            raise DaemonFailed("the block is not sealed in time")
        time.sleep(POLL_SECONDS)
    for _ in range(WARM_UP):
        os.close(os.open(path, os.O_RDONLY))
    opens, closes, clock = [], [], time.monotonic_ns
    begun = after = clock()
    for _ in range(options.opens):
        before = clock()
        descriptor = os.open(path, os.O_RDONLY)
        between = clock()
        os.close(descriptor)
        after = clock()
        opens.append(between - before)
        closes.append(after - between)
    return Client(opens, closes, begun, after)


def _records(folder: Path, client: Client) -> list[Record]:
    """What the daemon did while the client was at it."""
    files = list(folder.glob("*.json"))
    if len(files) != 1:
        raise DaemonFailed(f"{len(files)} processes answered the mount, or did not use readv")
    every: list[Record] = [tuple(record) for record in json.loads(files[0].read_text())]
    return [record for record in every if client.begun <= record[1] <= client.ended]


def _by_kind(records: Iterable[Record], opens: int) -> Iterator[Requests]:
    """The kinds of requests, those first that cost an open most."""
    kinds: dict[int, list[Record]] = {}
    for record in records:
        kinds.setdefault(record[0], []).append(record)
    found = [
        Requests(
            NAMES.get(opcode, str(opcode)),
            len(some) / opens,
            *(
                statistics.median(each[end] - each[end - 1] for each in some) / 1e3
                for end in (2, 3, 4)
            ),
        )
        for opcode, some in kinds.items()
    ]
    yield from sorted(found, key=lambda each: -each.total_us)


def _functions(folder: Path, opens: int) -> list[dict[str, Any]]:
    """The daemon's functions, those first that take most time themselves; for one open."""
    (file,) = folder.glob("*.functions")
    stats = pstats.Stats(str(file)).get_stats_profile().func_profiles
    found = [
        {
            "function": f"{Path(each.file_name).name}:{each.line_number} {name}",
            "calls": int(each.ncalls.partition("/")[0]) / opens,
            "own_us": each.tottime / opens * 1e6,
            "with_called_us": each.cumtime / opens * 1e6,
        }
        for name, each in stats.items()
    ]
    return sorted(found, key=lambda each: -each["own_us"])


def _print_calls(calls: dict[str, Sample], wall_us: float, out: Console) -> None:
    table = _table("As the client sees it", "call", "p50 us", "p99 us", "p99.9 us")
    for name, sample in calls.items():
        values = (sample.p50_us, sample.p99_us, sample.p999_us)
        table.add_row(name, *(report.microseconds(value) for value in values))
    table.add_row("both, mean", report.microseconds(wall_us), "", "")
    out.print(table)


def _print_requests(requests: Iterable[Requests], out: Console) -> None:
    title = "In the daemon, for each open and close (medians; the trace adds about 1 us a request)"
    headings = ("read us", "perform us", "answer us", "all, per open us")
    table = _table(title, "request", "per open", *headings)
    total = 0.0
    for each in requests:
        total += each.total_us
        times = (each.read_us, each.perform_us, each.answer_us, each.total_us)
        table.add_row(each.name, f"{each.per_open:.2f}", *map(report.microseconds, times))
    table.add_row("", "", "", "", "", report.microseconds(total))
    out.print(table)


def _print_functions(functions: Iterable[dict[str, Any]], out: Console) -> None:
    title = "Functions of the daemon, for each open and close (with cProfile: read as shares)"
    table = _table(title, "function", "calls", "own us", "with what it calls us")
    for each in functions:
        times = (each["own_us"], each["with_called_us"])
        table.add_row(each["function"], f"{each['calls']:.2f}", *map(report.microseconds, times))
    out.print(table)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
