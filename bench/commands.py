"""What `python -m bench` does, from options to what goes into the JSON."""

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import coldimage, fio, machine, memory, mounting, places, report, rounds
from bench.measures import Workload
from bench.places import Place
from bench.targets import (
    MEMORY_AIM_BYTES,
    MEMORY_MUST_BYTES,
    MOUNT_AIM_SECONDS,
    MOUNT_MUST_SECONDS,
)

MIB = 2**20
HOT_MIN = 256 * MIB
COLD_MIN = 1024 * MIB
ROOM = 6  # times the blocks: those that stay, those being put, and as much again for the margins


def side_by_side(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Every chosen measure, in every place."""
    warm, cold = rounds.chosen(options.only)
    plan = rounds.Plan(warm, cold, options.rounds)
    work = Workload(size=options.size, blocks=options.blocks, seconds=options.seconds)
    room = ROOM * options.size * options.blocks
    hot_bytes = options.hot or max(HOT_MIN, room)
    cold_bytes = options.cold or max(COLD_MIN, room)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(places.workroom(options.dir))
        mounts = list(_the_mounts(stack, options, base, hot_bytes, cold_bytes, laid_out=bool(cold)))
        where = [
            *mounts,
            stack.enter_context(places.tmpfs(base)),
            stack.enter_context(places.directory_in(base, places.LOCAL)),
        ]
        if not mounts[0].tiers:
            out.print(f"{options.mount} is no ctxfs mount, so there is nothing to judge.")
        beside = _fio(options, base, cold_bytes, out) if cold else None
        facts = machine.facts(base)
        with out.status("") as status:
            results = rounds.run(plan, where, beside, work, status.update)
        daemons = {each.name: machine.daemon(options.mount or each.path) for each in mounts}
    report.print_figures(results, out)
    if found := report.verdicts(results):
        report.print_verdicts(found, out)
    return {"machine": facts, "daemons": daemons, **report.as_json(results)}


def memory_per_block(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The daemon's memory for each block."""
    hot_bytes = options.hot or memory.hot_bytes(options.blocks, options.bytes)
    cold_bytes = options.cold or max(COLD_MIN, hot_bytes)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(places.workroom(options.dir))
        (place,) = _the_mounts(stack, options, base, hot_bytes, cold_bytes)
        facts = machine.facts(base)
        out.print(f"Making {options.blocks:,} blocks of {options.bytes} bytes.")
        found = memory.measure(
            place.path,
            options.mount or place.path,
            blocks=options.blocks,
            size=options.bytes,
            each=options.each,
        )
        daemons = {place.name: machine.daemon(options.mount or place.path)}
    out.print(
        f"{found.per_block:,.0f} bytes per block (must {MEMORY_MUST_BYTES}, aim "
        f"{MEMORY_AIM_BYTES}, at a million): {found.rss_before / MIB:.0f} MiB before, "
        f"{found.rss_after / MIB:.0f} MiB with them, {found.hot_blocks:,} of them hot; "
        f"{found.blocks / found.seconds:,.0f} made a second."
    )
    per_block = {**asdict(found), "per_block": found.per_block}
    return {"machine": facts, "daemons": daemons, "memory": per_block}


def mount_with_many_blocks(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """From the start of the daemon until the mount answers."""
    (channel,) = options.channel or ["auto"]
    found = []
    with places.workroom(options.dir) as base:
        facts = machine.facts(base)
        size = coldimage.image_bytes(options.blocks)
        out.print(f"Making {options.blocks:,} blocks in a cold file of {size // MIB:,} MiB.")
        for each in mounting.measure(base, blocks=options.blocks, channel=channel):
            found.append(each)
            out.print(
                f"{each.name}: {each.ready_seconds:.2f} s until the mount of {each.blocks:,} "
                f"blocks answered (at a million: must {MOUNT_MUST_SECONDS}, aim "
                f"{MOUNT_AIM_SECONDS}); the cold tier alone {each.recover_seconds:.2f} s."
            )
    return {"machine": facts, "mounts": [asdict(each) for each in found]}


def _the_mounts(
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    base: Path,
    hot: int,
    cold: int,
    *,
    laid_out: bool = False,
) -> Iterator[Place]:
    """The mounts to measure: the one given, or one of our own for each channel asked for.

    `laid_out`: with cold files that were written to, as fio's is.
    """
    if options.mount is not None:
        yield stack.enter_context(places.mounted(options.mount.absolute()))
        return
    channels = options.channel or ["auto"]
    for channel in channels:
        name = channel if len(channels) > 1 else places.CTXFS
        file = base / f"cold-{name}"
        if laid_out:
            fio.write_whole(file, cold)
        arguments = ["--hot", str(hot), "--cold", f"{file}:{cold}"]
        arguments += ["--channel", channel]
        yield stack.enter_context(places.own_mount(base, arguments, name=name))


def _fio(options: argparse.Namespace, base: Path, file_bytes: int, out: Console) -> fio.Fio | None:
    if options.no_fio:
        return None
    out.print(f"Laying out {file_bytes // MIB} MiB for fio.")
    try:
        return fio.lay_out(base, file_bytes=file_bytes, size=options.size)
    except fio.FioFailed as error:
        out.print(f"Without fio: {error}", markup=False)
        return None
