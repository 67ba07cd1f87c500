"""`ctx stat`: all that is known of blocks and directories."""

import argparse
import os
import stat as stat_module
from typing import Any

from ctxfs import xattrs

from ._cli import Subparsers, add_command, add_keys
from ._common import (
    Mount,
    Tally,
    for_each,
    open_mount,
    read_story,
)
from ._output import STYLES, console, escape, is_terminal, print_json, short_duration, short_size


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "stat", "show all that is known of blocks", run)
    add_keys(parser, metavar="PATH")
    return parser


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, args.keys)
    tally = Tally()
    rows = for_each(mount, args.keys, lambda key: describe(mount, key), tally)
    if args.json:
        print_json(rows)
    else:
        _print([row for row in rows if row["ok"]])
    return tally.exit_code


def describe(mount: Mount, key: str) -> dict[str, Any]:
    """A block's story, or what a directory has in its place. Raises OSError."""
    status = os.lstat(mount.path(key))
    if stat_module.S_ISDIR(status.st_mode):
        return {"type": "directory", **_describe_directory(mount, key, status)}
    return {"type": "block", **read_story(mount, key)}


def _describe_directory(mount: Mount, key: str, status: os.stat_result) -> dict[str, Any]:
    path = mount.path(key)
    attributes = {
        name: os.fsdecode(os.getxattr(path, name))
        for name in os.listxattr(path)
        if name.startswith("user.")
    }
    ttl = attributes.pop(os.fsdecode(xattrs.TTL), None)
    together = attributes.pop(os.fsdecode(xattrs.TOGETHER), None)
    replicas = attributes.pop(os.fsdecode(xattrs.REPLICAS), None)
    ours = os.fsdecode(xattrs.PREFIX)
    return {
        "default_ttl": ttl,  # seconds as text, `none`, or null where the one above holds
        "together": together == "1",
        "replicas": None if replicas is None else int(replicas),  # null where the one above holds
        "mode": stat_module.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "attributes": {
            name: value for name, value in attributes.items() if not name.startswith(ours)
        },
    }


def _print(rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        if number:
            print()
        lines = directory_lines(row) if row["type"] == "directory" else block_lines(row)
        width = max(len(label) for label, _ in lines)
        if is_terminal():
            from rich.text import Text

            for label, value in lines:
                console().print(
                    Text(f"{label:>{width}}  ", style="dim"),
                    Text(value, style=STYLES.get(value, "")),
                    sep="",
                    soft_wrap=True,
                )
        else:
            for label, value in lines:
                print(f"{label:>{width}}  {value}")


def _exact(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    return f"{short_size(size_bytes)} ({size_bytes} bytes)"


def _owner(row: dict[str, Any]) -> str:
    return f"{row['mode']:04o}, uid {row['uid']}, gid {row['gid']}"


def _pin(value: str) -> str:
    if value == "0":
        return "no"
    return "yes" if value == "1" else f"for {short_duration(float(value))}"


def _default_ttl(value: str | None) -> str:
    if value is None:
        return "inherited"
    return value if value == "none" else short_duration(float(value))


def block_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value of each line about a block."""
    lines = [
        ("key", escape(row["key"])),
        ("state", row["state"]),
        ("size", _exact(row["size_bytes"])),
        ("stored", _exact(row["stored_bytes"])),
        ("tier", row["tier"] or "-"),
        ("copies", ", ".join(row["copies"]) or "-"),
        ("placement", row["placement"]),
        ("ttl", short_duration(row["ttl_s"], absent="none")),
        ("pinned", _pin(str(row["pin"]))),
        ("hits", str(row["hits"])),
        ("idle", short_duration(row["idle_s"])),
        ("open", str(row["open"])),
        ("created", row["created"] or "-"),
        ("generation", str(row["generation"])),
        ("digest", row["digest"] or "-"),
        ("codec", row["codec"] or "-"),
        ("mode", _owner(row)),
    ]
    said = ("replicas", "parent", "dtype")
    lines += [(name, escape(row[name])) for name in said if row.get(name)]
    return lines + _attribute_lines(row)


def directory_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value of each line about a directory."""
    return [
        ("key", escape(row["key"]) + "/"),
        ("default ttl", _default_ttl(row["default_ttl"])),
        ("together", "yes" if row["together"] else "no"),
        ("replicas", "inherited" if row["replicas"] is None else str(row["replicas"])),
        ("mode", _owner(row)),
        *_attribute_lines(row),
    ]


def _attribute_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (escape(name), escape(str(value)))
        for name, value in sorted((row.get("attributes") or {}).items())
    ]
