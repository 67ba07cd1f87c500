"""Which NVMe drives could be a cold tier that is sent commands: part of `ctx doctor`."""

import os
from collections.abc import Iterator

from ._machine import OK, WARN, Check, Machine

COMMANDS_KERNEL = (5, 19)  # io_uring passes NVMe commands on
NAME = "nvme"


def check_nvme(machine: Machine) -> Check:
    """One line for all drives: what each is free for, or who has it."""
    drives = sorted(path.name for path in (machine.root / "dev").glob("ng*n*"))
    if not drives:
        return Check(NAME, OK, "no NVMe command devices; cold tiers use files and block devices")
    told = ", ".join(f"{name} {_state(machine, name)}" for name in drives)
    if machine.kernel < COMMANDS_KERNEL:
        remedy = "Linux 5.19 sends NVMe commands through io_uring; use the block devices"
        return Check(NAME, WARN, told, remedy)
    closed = [
        name for name in drives if not os.access(machine.root / "dev" / name, os.R_OK | os.W_OK)
    ]
    if closed:
        return Check(NAME, WARN, f"{told}; not yours to open: {', '.join(closed)}", "run as root")
    return Check(NAME, OK, told)


def _state(machine: Machine, name: str) -> str:
    """Of the drive behind a command device: free, or why a cold tier cannot have it whole."""
    block = f"sys/class/block/nvme{name.removeprefix('ng')}"
    if not (machine.root / block).is_dir():
        return "has no block device"
    parts = sorted(path.parent.name for path in (machine.root / block).glob("*/partition"))
    for point in _mounted_on(machine, [block, *(f"{block}/{part}" for part in parts)]):
        return f"is mounted on {point}"
    if parts:
        return f"is partitioned ({', '.join(parts)})"
    holders = sorted(path.name for path in (machine.root / block / "holders").glob("*"))
    if holders:
        return f"is used by {', '.join(holders)}"
    return "can be sent commands"


def _mounted_on(machine: Machine, blocks: list[str]) -> Iterator[str]:
    numbers = {machine.read(f"{block}/dev") for block in blocks} - {None}
    for line in (machine.read("proc/self/mountinfo") or "").splitlines():
        fields = line.split(" ")
        if len(fields) > 4 and fields[2] in numbers:
            yield fields[4]
