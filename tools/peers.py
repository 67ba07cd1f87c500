"""`ctx peers`: the members of the cluster, and where they are known from."""

import argparse
import json
from pathlib import Path
from typing import Any

from ._cli import Subparsers, add_command
from ._common import (
    OK,
    TIER_TROUBLE,
    Mount,
    ToolError,
    failure,
    interruptible,
    no_mount,
    open_mount,
)
from ._output import Table, escape, print_json, short_duration, short_size


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    return add_command(subparsers, "peers", "show the members of the cluster", run)


def run(args: argparse.Namespace) -> int:
    told = read_peers(open_mount(args, ()))
    reachable = told["source"]["reachable"]
    if args.json:
        print_json(told)
    elif told["cluster"] is None:
        print("this mount is in no cluster")
    else:
        print(headline(told))
        print()
        member_table(told["members"]).print()
    return TIER_TROUBLE if reachable is False else OK


def read_peers(mount: Mount) -> dict[str, Any]:
    """`.ctx/peers`. Raises ToolError."""
    try:
        text = interruptible(Path(mount.control("peers")).read_bytes)
        told: dict[str, Any] = json.loads(text)
    except FileNotFoundError:
        raise no_mount(mount.point) from None
    except OSError as error:
        raise failure(mount.point, error) from error
    except ValueError as error:
        raise ToolError(f"its list of peers is no JSON: {error}", subject=mount.point) from error
    return told


def headline(told: dict[str, Any]) -> str:
    """One line: which cluster, and how much of what is told can be relied on."""
    source = told["source"]
    line = f"cluster {escape(told['cluster'])}, "
    if source["kind"] == "none":
        return line + "alone"
    if source["kind"] == "list":
        return line + "by the list in the configuration"
    if source["reachable"]:
        return line + f"by etcd, which answers since {source['since']}"
    if source["reachable"] is None:
        return line + "by etcd, which has not answered yet"
    return line + f"by etcd, which is AWAY since {source['since']}: {escape(source['why'] or '')}"


def member_table(members: list[dict[str, Any]]) -> Table:
    """One line a member; the own one is marked by an asterisk."""
    table = Table(
        (
            "",
            "MEMBER",
            "STATE",
            ">AWAY",
            "HEALTH",
            ">RTT",
            ">IN",
            ">OUT",
            "ZONE",
            ">WEIGHT",
            "ADDRESS",
        )
    )
    for member in members:
        peer = member.get("peer") or {}
        round_trip_s = peer.get("round_trip_s")
        table.rows.append(
            (
                "*" if member["self"] else "",
                escape(member["name"]),
                member["state"],
                short_duration(member["away_s"]),
                peer.get("health", ""),
                "" if round_trip_s is None else f"{1e3 * round_trip_s:.1f}ms",
                short_size(peer["received_bytes"]) if peer else "",
                short_size(peer["sent_bytes"]) if peer else "",
                escape(member["zone"]),
                short_size(member["weight_bytes"]),
                escape(member["address"]),
            )
        )
    return table
