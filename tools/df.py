"""`ctx df`: how full the tiers are."""

import argparse
from typing import Any

from ._cli import Subparsers, add_command
from ._common import (
    OK,
    open_mount,
)
from ._output import Table, escape, percent, print_json, short_size


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    return add_command(subparsers, "df", "show how full the tiers and their devices are", run)


def run(args: argparse.Namespace) -> int:
    mount = open_mount(args, ())
    stats = mount.stats()
    if args.json:
        print_json({"mount": mount.point, "blocks": stats["blocks"], "tiers": stats["tiers"]})
        return OK
    tier_table(stats["tiers"]).print()
    devices = device_table(stats["tiers"])
    if devices.rows:
        print()
        devices.print()
    return OK


def tier_table(tiers: dict[str, dict[str, Any]]) -> Table:
    """One line a tier. `LIVE` is what blocks need; `USED` also what is not reclaimed yet."""
    table = Table(("TIER", ">CAPACITY", ">USED", ">LIVE", ">FREE", ">USE", ">BLOCKS", ">PINNED"))
    for name, tier in tiers.items():
        capacity, used = tier["capacity_bytes"], tier["used_bytes"]
        table.rows.append(
            (
                name,
                short_size(capacity),
                short_size(used),
                short_size(tier.get("live_bytes", used)),
                short_size(max(0, capacity - used)),
                percent(used, capacity),
                str(tier["blocks"]),
                short_size(tier.get("pinned_bytes")),
            )
        )
    return table


def device_table(tiers: dict[str, dict[str, Any]]) -> Table:
    """One line a device of any tier that has some."""
    table = Table(("TIER", "STATE", ">CAPACITY", ">LIVE", ">FREE", ">ERRORS", "ENGINE", "DEVICE"))
    for name, tier in tiers.items():
        for device in tier.get("devices", ()):
            table.rows.append(
                (
                    name,
                    device["state"],
                    short_size(device["capacity_bytes"]),
                    short_size(device["live_bytes"]),
                    short_size(device["free_bytes"]),
                    str(device["errors"]),
                    device["engine"],
                    escape(device["path"]),
                )
            )
    return table
