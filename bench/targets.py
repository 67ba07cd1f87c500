"""The numbers to reach, and what each of them is a ratio to."""

from dataclasses import dataclass
from typing import Literal

from bench.places import FIO, IPERF, LOCAL, TMPFS


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the agreement.

    `over` names the place whose rate divides ours; empty where the figure stands for itself: then
    `figure` says which one, and whether more or less of it is better.
    """

    measure: str
    must: float
    aim: float
    over: str = ""
    figure: Literal["ratio", "p50_us", "per_second"] = "ratio"

    def reached(self, value: float, limit: float) -> bool:
        return value <= limit if self.figure == "p50_us" else value >= limit


# The direct channel has to reach them; the pyfuse3 channel is the reference for behaviour.
TARGETS = (
    Target("put-rename", 0.8, 3.0, over=TMPFS),
    Target("put-close", 0.8, 3.0, over=TMPFS),
    Target("get-read", 0.9, 1.0, over=TMPFS),
    Target("get-read", 0.8, 1.0, over=LOCAL),
    Target("get-mmap", 2.0, 3.0, over=TMPFS),
    Target("open-close", 30.0, 12.0, figure="p50_us"),
    Target("miss", 100_000, 1_000_000, figure="per_second"),
    Target("miss-again", 100_000, 1_000_000, figure="per_second"),
    Target("write-out", 0.8, 0.95, over=FIO),
    Target("write-out-fsync", 0.8, 0.95, over=FIO),
    Target("cold-get", 0.9, 0.95, over=FIO),
    Target("remote-get", 0.8, 0.95, over=IPERF),
)

MEMORY_MUST_BYTES = 500  # of the daemon, per block, at a million blocks
MEMORY_AIM_BYTES = 200

MOUNT_MUST_SECONDS = 5  # until a mount with a million cold blocks answers
MOUNT_AIM_SECONDS = 1
