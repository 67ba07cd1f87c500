"""`ctx top`: a live view of tiers, rates and the most used blocks."""

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from ctxfs.errors import BadValue
from ctxfs.units import parse_duration_ns

from ._cli import Subparsers, add_command
from ._common import (
    OK,
    USAGE,
    Mount,
    ToolError,
    open_mount,
)
from ._output import (
    NS_PER_S,
    Table,
    console,
    escape,
    is_terminal,
    percent,
    print_json,
    print_json_line,
    short_duration,
    short_size,
)
from ._watch import RATES, Hottest, View, rates
from .df import device_table, tier_table

SCAN_S = 0.2  # of each interval at most, spent on looking for the most used blocks
INTERVAL_S_MIN = 0.1
RATES_ABREAST = 4


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "top", "show tiers, rates and the most used blocks, live", run)
    parser.add_argument("--once", action="store_true", help="show it once, with rates since start")
    parser.add_argument(
        "--interval", metavar="DURATION", default="2s", help="time between views (default: 2s)"
    )
    parser.add_argument(
        "--blocks", metavar="N", type=int, default=10, help="how many blocks (default: 10; 0: none)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    interval_s = parse_interval_s(args.interval)
    mount = open_mount(args, ())
    first = mount.stats()
    if args.once:
        blocks = _all_of(Hottest(mount, args.blocks))
        view = make_view(first, rates(None, first, first["uptime_s"]), blocks)
        if args.json:
            print_json(view)
        else:
            _print_plain(view)
        return OK
    views = _views(mount, first, interval_s, args.blocks)
    if args.json or not is_terminal():
        for view in views:
            if args.json:
                print_json_line(view)
            else:
                _print_plain(view)
        return OK
    return _live(views)


def parse_interval_s(text: str) -> float:
    """Seconds. Raises ToolError."""
    try:
        interval_ns = parse_duration_ns(text)
    except BadValue as error:
        raise ToolError(str(error), exit_code=USAGE) from None
    if interval_ns is None:
        raise ToolError("an interval is needed", "2s, 500ms", subject=text, exit_code=USAGE)
    return max(INTERVAL_S_MIN, interval_ns / NS_PER_S)


def _all_of(hottest: Hottest) -> list[View]:
    while not hottest.advance(SCAN_S):
        pass
    return hottest.blocks


def make_view(stats: View, rates_now: dict[str, float], blocks: list[View]) -> View:
    """All that one picture shows; also what `--json` prints."""
    shown = ("key", "tier", "size_bytes", "hits", "idle_s", "ttl_s")
    return {
        "mount": stats["mount"],
        "pid": stats["pid"],
        "version": stats["version"],
        "channel": stats["channel"],
        "uptime_s": stats["uptime_s"],
        "blocks": stats["blocks"],
        "tiers": stats["tiers"],
        "rates": rates_now,
        "rss_bytes": stats["memory"]["rss_bytes"],
        "hottest": [{name: block[name] for name in shown} for block in blocks],
    }


def _views(mount: Mount, first: View, interval_s: float, count: int) -> Iterator[View]:
    """A view at once, then one an interval; whoever takes them may wait in between."""
    hottest = Hottest(mount, count)
    before, before_s = first, time.monotonic()
    hottest.advance(min(SCAN_S, interval_s / 2))
    yield make_view(first, rates(None, first, first["uptime_s"]), hottest.blocks)
    while True:
        _pause(interval_s)
        now, now_s = mount.stats(), time.monotonic()
        hottest.advance(min(SCAN_S, interval_s / 2))
        yield make_view(now, rates(before, now, now_s - before_s), hottest.blocks)
        before, before_s = now, now_s


class _Quit(Exception):
    """Somebody pressed `q`."""


def _pause(seconds: float) -> None:
    """Wait, but no longer than until `q` is pressed. Raises _Quit."""
    end = time.monotonic() + seconds
    keyboard = [sys.stdin.fileno()] if is_terminal() and sys.stdin.isatty() else []
    while (rest := end - time.monotonic()) > 0:
        if select.select(keyboard, [], [], rest)[0]:
            # Past the text layer: what it would keep back, select does not see.
            keys = os.read(keyboard[0], 64).lower()
            if not keys or b"q" in keys:
                raise _Quit


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive as they are pressed, and are not echoed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _live(views: Iterator[View]) -> int:
    from rich.live import Live

    screen = console()
    with (
        contextlib.suppress(_Quit),
        _single_keys(),
        Live(console=screen, screen=True, auto_refresh=False) as live,
    ):
        for view in views:
            live.update(_picture(view), refresh=True)
    return OK


def heading(view: View) -> str:
    """The first line."""
    return (
        f"ctxfs {view['version']} at {escape(view['mount'])}, pid {view['pid']}, "
        f"{view['channel']} channel, up {short_duration(view['uptime_s'])}, "
        f"{view['blocks']['total']} blocks, daemon {short_size(view['rss_bytes'])}"
    )


def rate_table(view: View) -> Table:
    """Rates, several side by side: a terminal is wider than it is high."""
    now = view["rates"]
    hits = sum(now[f"hits_{tier}_per_s"] for tier in ("hot", "warm", "cold"))
    cells = [("hit ratio", percent(hits, hits + now["misses_per_s"]))]
    for name, label in RATES:
        value = now[f"{name}_per_s"]
        amount = short_size(int(value)) if name.endswith("_bytes") else f"{value:.1f}"
        cells.append((label, amount))
    cells += [("", "")] * (-len(cells) % RATES_ABREAST)
    table = Table(("RATE", ">PER S") * RATES_ABREAST)
    for start in range(0, len(cells), RATES_ABREAST):
        abreast = cells[start : start + RATES_ABREAST]
        table.rows.append([text for cell in abreast for text in cell])
    return table


def block_table(view: View) -> Table:
    """The most used blocks."""
    table = Table((">HITS", ">IDLE", "TIER", ">SIZE", ">TTL", "KEY"))
    for block in view["hottest"]:
        table.rows.append(
            (
                str(block["hits"]),
                short_duration(block["idle_s"]),
                block["tier"] or "-",
                short_size(block["size_bytes"]),
                short_duration(block["ttl_s"], absent="none"),
                escape(block["key"]),
            )
        )
    return table


def _tables(view: View) -> list[Table]:
    tables = [tier_table(view["tiers"]), device_table(view["tiers"]), rate_table(view)]
    return [table for table in [*tables, block_table(view)] if table.rows]


def _picture(view: View) -> Any:
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(heading(view), style="bold"),
        *(table.renderable() for table in _tables(view)),
        Text("q quits", style="dim"),
    )


def _print_plain(view: View) -> None:
    print(heading(view))
    for table in _tables(view):
        print("", *table.lines(), sep="\n")
    print(flush=True)
