"""`ctx events`: what happened to blocks, and what happens now."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from ._cli import Subparsers, add_command
from ._common import (
    OK,
    Mount,
    failure,
    interruptible,
    no_mount,
    open_mount,
)
from ._output import STYLES, console, escape, is_terminal, print_json_line, short_size

CHUNK_BYTES = 64 << 10


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "events", "show what happened to blocks", run)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on, until Ctrl-C, as things happen"
    )
    parser.add_argument(
        "--kind", metavar="K", action="append", help="only this kind: sealed, moved, evicted, …"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, ())
    show = print_json_line if args.json else _print
    for event in read_events(mount, follow=args.follow):
        if not args.kind or event.get("event") in args.kind:
            show(event)
    return OK


def read_events(mount: Mount, *, follow: bool) -> Iterator[dict[str, Any]]:
    """The kept events, oldest first; with `follow` also every new one. Raises ToolError."""
    path = mount.control("events" if follow else "events.recent")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise no_mount(mount.point) from None
    except OSError as error:
        raise failure(path, error) from error
    try:
        yield from _parse(_lines(descriptor))
    except OSError as error:
        raise failure(path, error) from error
    finally:
        os.close(descriptor)


def _lines(descriptor: int) -> Iterator[bytes]:
    rest = b""
    while piece := interruptible(os.read, descriptor, CHUNK_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _parse(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line.decode("utf-8", "surrogateescape"))
        except ValueError:
            continue  # a line the kept ring begins with may have lost its start
        if isinstance(event, dict):
            yield event


def event_line(event: dict[str, Any]) -> str:
    """One event as a line: time, kind, size, way, key, and whatever else it carries."""
    way = ""
    if "from" in event or "to" in event:
        way = f"{event.get('from') or '-'}→{event.get('to') or '-'}"
    elif event.get("tier"):
        way = str(event["tier"])
    told = {"time", "event", "key", "generation", "size_bytes", "tier", "from", "to"}
    rest = " ".join(f"{name}={escape(str(event[name]))}" for name in event if name not in told)
    head = f"{event.get('time', '-')}  {event.get('event', '-'):<8}"
    columns = f"{short_size(event.get('size_bytes')):>9}  {way or '-':<9}"
    key = escape(str(event.get("key", "-")))
    return f"{head}  {columns}  {key}  {rest}".rstrip()


def _print(event: dict[str, Any]) -> None:
    if is_terminal():
        console().print(
            event_line(event), style=STYLES.get(str(event.get("event")), ""), soft_wrap=True
        )
    else:
        print(event_line(event), flush=True)
