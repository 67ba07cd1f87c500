"""`ctx dump`: what lies at an offset of a cold device, decoded."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxfs.errors import BadValue, CtxfsError
from ctxfs.units import format_duration, parse_size

from ._cli import Subparsers, add_command
from ._common import FAILED, OK, USAGE, ToolError
from ._output import NS_PER_S, Table, escape, print_json, short_size

if TYPE_CHECKING:
    from ctxfs.ondisk.describe import Device
    from ctxfs.ondisk.found import Found

RAW_BYTES_MAX = 64 << 10
CODEC_HEADER_BYTES = 4096  # more than it takes
ROW_BYTES = 16
HEX_FIELDS = ("checksum", "data_checksum", "salt")
FOREVER_NS = 2**64 - 1


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "dump", "show what lies on a cold device, decoded", run, options=("--json",)
    )
    parser.add_argument("--raw", action="store_true", help="also the bytes of its header, in hex")
    parser.add_argument("device", metavar="DEVICE", help="a device or file of a cold tier")
    parser.add_argument(
        "offset",
        metavar="OFFSET",
        nargs="?",
        type=_offset,
        help="bytes: 1052672, 0x101000 or 1MiB; without it, superblocks and segments",
    )
    return parser


def _offset(word: str) -> int:
    from ._cli import plain

    text = plain(word)
    try:
        return int(text, 0) if text[:2].lower() == "0x" else parse_size(text)
    except (ValueError, BadValue) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no offset") from error


def run(args: argparse.Namespace) -> int:
    from ctxfs.ondisk.describe import Device

    if args.raw and args.offset is None:
        raise ToolError("--raw wants an OFFSET", exit_code=USAGE)
    try:
        with _opened(args.device) as fd:
            device = Device(lambda offset, length: os.pread(fd, length, offset))
            if args.offset is None:
                return _overview(args, device)
            end = os.lseek(fd, 0, os.SEEK_END)
            if not 0 <= args.offset < end:
                raise ToolError(
                    f"it has {end} bytes, and ends before {args.offset}",
                    subject=args.device,
                    exit_code=USAGE,
                )
            found = device.at(args.offset)
            _add_codec(fd, found)
            return _one(args, fd, found)
    except OSError as error:
        raise ToolError(error.strerror or str(error), subject=args.device) from error


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    if not (Path(name).is_file() or Path(name).is_block_device()):
        raise ToolError("is no file and no block device", subject=name, exit_code=USAGE)
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


# -- all of it


def _overview(args: argparse.Namespace, device: Device) -> int:
    superblocks = device.superblocks()
    bad = any(each.problems for each in superblocks)
    if args.json:
        segments = [asdict(each) for each in device.segments()]
        print_json({"superblocks": [_row(each) for each in superblocks], "segments": segments})
        return FAILED if bad or any(each["state"] == "damaged" for each in segments) else OK
    for found in superblocks:
        print("\n".join(_lines(found)))
    if device.foreign is not None:
        print(f"It holds {device.foreign}.")
    table = Table((">SEGMENT", ">OFFSET", "KIND", ">SEQUENCE", ">USED", ">ITEMS", "NOTE"))
    for each in device.segments():
        bad = bad or each.state == "damaged"
        numbers = (str(each.sequence), short_size(each.used_bytes), str(each.items))
        empty = each.state == "free"
        table.rows.append(
            (
                str(each.index),
                str(each.offset),
                each.state,
                *(("-", "-", "-") if empty else numbers),
                each.problem,
            )
        )
    if table.rows:
        table.print()
    return FAILED if bad else OK


# -- one thing


def _add_codec(fd: int, found: Found) -> None:
    """Add what the codec says of data that it made, where that begins in this record."""
    from ctxfs.codec.stream import describe, read_header

    fields = found.fields
    if found.data_offset is None or not fields.get("encoded_pages") or fields["part_offset"]:
        return
    try:
        header = read_header(os.pread(fd, CODEC_HEADER_BYTES, found.data_offset))
    except CtxfsError as error:
        found.problems.append(f"its encoded data: {error}")
        return
    fields |= {
        "codec": describe(header),
        "codec_content_bytes": header.raw_bytes,
        "codec_stream_bytes": header.encoded_bytes,
        "codec_chunk_bytes": header.chunk_bytes,
    }


def _one(args: argparse.Namespace, fd: int, found: Found) -> int:
    raw = b""
    if args.raw:
        end = found.data_offset or found.offset + found.length_bytes
        raw = os.pread(fd, min(end - found.offset, RAW_BYTES_MAX), found.offset)
    if args.json:
        print_json({**_row(found), **({"raw": raw.hex()} if args.raw else {})})
    else:
        print("\n".join(_lines(found)))
        for line in _hex_lines(raw, found.offset):
            print(line)
    return FAILED if found.problems else OK


def _lines(found: Found) -> Iterator[str]:
    yield f"{found.kind} at {found.offset} (0x{found.offset:x}), {found.length_bytes} bytes"
    for problem in found.problems:
        yield f"  WRONG: {problem}"
    yield from _field_lines(found.fields)
    if found.data_offset is not None:
        yield f"  {'data at':<22}{found.data_offset} (0x{found.data_offset:x})"
    for entry in found.entries:
        yield f"  {entry['entry']}"
        yield from _field_lines({k: v for k, v in entry.items() if k != "entry"}, indent=4)
    if found.columns:
        table = Table(("  COLUMN", "TYPE", ">ROWS", ">BYTES", ""))
        for each in found.columns:
            row = (str(each["rows"]), str(each["bytes"]), "one for all" * each["constant"])
            table.rows.append((f"  {each['name']}", each["type"], *row))
        yield from table.lines()


def _field_lines(fields: dict[str, Any], indent: int = 2) -> Iterator[str]:
    for name, value in fields.items():
        if name != "attributes":
            yield f"{' ' * indent}{name:<22}{_text(name, value)}"
            continue
        for attribute, content in value:
            label = escape(os.fsdecode(attribute))
            yield f"{' ' * indent}{label:<22}{escape(os.fsdecode(content))}"


def _text(name: str, value: Any) -> str:
    """A field as people read it."""
    if isinstance(value, bytes):
        return value.hex() if name == "digest" else escape(os.fsdecode(value))
    if name in HEX_FIELDS:
        return f"{value:016x}"
    if name == "mode":
        return f"{value:04o}"
    if name == "default_ttl_ns":
        return "not set" if value < 0 else format_duration(value or None)
    if name.endswith("_ns"):
        return _time(name, value)
    if name.endswith("_bytes") and value >= 1024:
        return f"{value} ({short_size(value)})"
    return str(value)


def _time(name: str, time_ns: int) -> str:
    if name == "expires_ns" and not time_ns:
        return "never"
    if name == "pin_until_ns" and time_ns in (0, FOREVER_NS):
        return "for ever" if time_ns else "not pinned"
    seconds, rest_ns = divmod(time_ns, NS_PER_S)
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest_ns:09d} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns since 1970"


def _row(found: Found) -> dict[str, Any]:
    """What `--json` prints."""
    row = asdict(found)
    row["fields"] = _plain(row["fields"])
    row["entries"] = [_plain(each) for each in row["entries"]]
    row["offset_bytes"] = row.pop("offset")
    row["data_offset_bytes"] = row.pop("data_offset")
    return row


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "attributes":
            plain[name] = {os.fsdecode(key): os.fsdecode(content) for key, content in value}
        elif isinstance(value, bytes):
            plain[name] = value.hex() if name == "digest" else os.fsdecode(value)
        else:
            plain[name] = value
    return plain


def _hex_lines(data: bytes, start: int) -> Iterable[str]:
    """Rows of 16 bytes; a `*` stands for rows that are as the one before."""
    before = b""
    starred = False
    for at in range(0, len(data), ROW_BYTES):
        row = data[at : at + ROW_BYTES]
        if row == before and at + ROW_BYTES < len(data):
            if not starred:
                yield "*"
            starred = True
            continue
        before, starred = row, False
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{start + at:010x}  {row.hex(' '):<47} |{text}|"
