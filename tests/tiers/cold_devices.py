"""What tests of cold devices that come, go and grow share."""

from collections.abc import Callable

from ctxfs.errors import DeviceLost
from ctxfs.tiers.cold import ColdDevice
from ctxfs.tiers.cold_drain import Drain
from ctxfs.tiers.cold_leaving import Leaving
from tests.fakes import MemoryEngine
from tests.tiers.cold_rig import SEGMENT, Rig, content


class Power:
    """One supply for several devices. It fails after so many writes and flushes together."""

    def __init__(self, requests: int, *engines: MemoryEngine) -> None:
        self.left = requests
        self.engines = engines
        for each in engines:
            each._use_power = self._use  # type: ignore[method-assign]

    @property
    def failed(self) -> bool:
        return self.left < 0

    def _use(self) -> None:
        self.left -= 1
        if self.failed:
            for each in self.engines:
                each.lost = True
            raise DeviceLost("the power is off")


async def add(rig: Rig, engine: MemoryEngine, *, power: Power | None = None) -> None:
    """Add a device to a tier that is open. It is there at the next opening, too."""
    path = f"memory{len(rig.engines)}"
    rig.engines.append(engine)
    if power is not None:
        engine._use_power = power._use  # type: ignore[method-assign]
    await rig.tier.add_device(
        ColdDevice(path, engine, segment_bytes=SEGMENT), rig.directories.values
    )


async def drain(
    rig: Rig, path: str = "memory0", make_room: Callable[[int], bool] = lambda need: False
) -> Leaving:
    """Drain a device, and say how it went."""
    log = rig.tier.begin_drain(path)
    assert log.leaving is not None
    await Drain(rig.tier, log, make_room).run()
    return log.leaving


def homes(rig: Rig, generation: int) -> list[str]:
    """The devices on which a block is."""
    return [log.path for log in rig.tier._logs if generation in log.index]


async def check_all(rig: Rig) -> None:
    """Every block is in one place, with its content."""
    for generation in rig.blocks:
        assert len(homes(rig, generation)) == 1
        await rig.check(generation)


def damage(rig: Rig, device: int, generation: int) -> None:
    """Flip a bit of a block's content where it lies on a device."""
    size = rig.blocks[generation].size
    medium = rig.engines[device].medium
    at = medium.index(content(generation, size)[:64])
    medium[at + size // 2] ^= 1
