"""An offline check of the devices of a cold tier, together: see `cold_examine` for each of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from ctxfs.codec.keyring import KeyRing
from ctxfs.device.engine import Engine
from ctxfs.ondisk.columnar import Table
from ctxfs.tiers.cold_content import ContentCheck
from ctxfs.tiers.cold_doubles import DropBlock, drop_doubles, drop_superseded
from ctxfs.tiers.cold_errands import Done, run_errands
from ctxfs.tiers.cold_examine import Examination
from ctxfs.tiers.cold_faults import DeviceReport, FaultKind, Tell
from ctxfs.tiers.cold_parts import part_position, part_segment
from ctxfs.tiers.cold_tables import TablePolicy
from ctxfs.tiers.cold_verdict import Verdict

# A name, and the whole length in bytes; what it gives is told of each step.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(slots=True)
class Checked:
    """What was found. `bad_content`: generations of blocks whose bytes are not what they were."""

    devices: list[Examination]
    bad_content: list[int]

    @property
    def reports(self) -> list[DeviceReport]:
        return [each.report for each in self.devices]

    @property
    def is_good(self) -> bool:
        return all(each.is_good for each in self.reports)


async def check(
    devices: Sequence[tuple[str, Engine]],
    tell: Tell,
    progress: Progress,
    *,
    content: bool,
    keys: KeyRing | None = None,
    tables: TablePolicy | None = None,
) -> Checked:
    """Check these devices, each a path and an engine that reads it; nothing is written.

    `content`: also compare every live block with its digest, decrypted with `keys`. `tables`: as
    the daemon was given, which keeps room for them. Raises ConfigError where a device is
    none of ours, or of a later format; DeviceLost; DeviceError where its start cannot be read.
    """
    examined = [Examination(path, engine, tell) for path, engine in devices]
    for each in examined:
        await each.look()
    _leave_copies_out(examined)
    usable = [each for each in examined if each.is_usable]
    verdicts = [Verdict(each, tables or TablePolicy()) for each in usable]
    for each, verdict in zip(usable, verdicts, strict=True):
        await each.find()
        with progress(each.path, each.work_bytes) as advance:
            await each.walk(advance, content=content)
        await verdict.settle()
    metas = _drop_what_is_there_twice(usable)
    checked = Checked(examined, [])
    for each, verdict in zip(usable, verdicts, strict=True):
        verdict.count_live()
        here = np.array([number in each.index for number in _generations(metas)], bool)
        of_device = metas.where(here)
        each.report.content_bytes = int(of_device.array("size").sum())
        if content:
            checking = ContentCheck(each, of_device, keys)
            with progress(f"{each.path}, contents", checking.work_bytes) as advance:
                await checking.run(advance)
            checked.bad_content += checking.bad
    return checked


def _generations(metas: Table) -> list[int]:
    numbers: list[int] = metas.array("generation").tolist()
    return numbers


def _leave_copies_out(devices: Sequence[Examination]) -> None:
    """A device that was copied, and given as another one, would have everything twice."""
    known: dict[str, Examination] = {}
    for each in devices:
        other = known.setdefault(each.report.uuid, each) if each.is_usable else each
        if other is not each:
            each.tell(FaultKind.COPY, f"it is a copy of {other.path}, or the same device")
            each.is_usable = False


def _drop_what_is_there_twice(devices: Sequence[Examination]) -> Table:
    """Decide as a start does, and tell of what it drops; the attributes of all that is live."""
    expected = not all(each.found.clean for each in devices)

    def tell(device: Examination, kind: FaultKind, what: str, generation: int, stamp: int) -> None:
        part = device.index.parts(generation)[0]
        row = int(np.flatnonzero(device.live.array("generation") == np.uint64(generation))[0])
        device.tell(
            kind,
            what,
            device.offset(part_segment(part), part_position(part)),
            key=device.live.ragged("key").row(row),
            generation=generation,
            expected=expected,
        )
        device.index.bury(generation, stamp)

    def dropper(device: Examination) -> DropBlock:
        return lambda generation, stamp: tell(
            device, FaultKind.COPY, "the block is there twice", generation, stamp
        )

    def drop_anywhere(generation: int, stamp: int) -> None:
        device = next(each for each in devices if generation in each.index)
        tell(device, FaultKind.KEY, "a newer block has the same key", generation, stamp)

    metas = drop_doubles([(each.live, dropper(each)) for each in devices])
    done = Done()
    metas = run_errands(metas, [errand for each in devices for errand in each.errands], done)
    for generation, stamp in done.gone:
        next(each for each in devices if generation in each.index).index.bury(generation, stamp)
    return drop_superseded(metas, drop_anywhere)[0]
