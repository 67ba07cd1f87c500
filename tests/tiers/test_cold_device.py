"""The cold tier on a real file through each engine: direct I/O, and a restart in between."""

from pathlib import Path

import pytest
import trio

from ctxfs.core.meta import BlockMeta
from ctxfs.device.blockfile import open_engine
from ctxfs.device.uring import probe
from ctxfs.tiers.cold import ColdDevice, ColdTier, Recovered
from tests.tiers.cold_rig import Rig

_SIZE = 48 << 20


class _FileRig(Rig):
    """One file; each opening is a new engine."""

    def __init__(self, path: Path, engine_name: str) -> None:
        super().__init__()
        self.path = path
        self.engine_name = engine_name

    async def use(self, nursery: trio.Nursery) -> Recovered:
        self.device = await open_engine(self.path, _SIZE, engine=self.engine_name)
        await nursery.start(self.device.run)
        self.tier = await ColdTier.open(
            [ColdDevice(str(self.path), self.device.engine)],
            describe=self.blocks.get,
            describe_directory=self.directories.get,
        )
        return await self.tier.recover()


@pytest.mark.parametrize("engine_name", ["io_uring", "threads"])
async def test_blocks_on_a_file_survive_a_restart(tmp_path: Path, engine_name: str) -> None:
    refusal = probe()
    if engine_name == "io_uring" and refusal is not None:
        pytest.skip(f"no io_uring here: {refusal}")
    rig = _FileRig(tmp_path / "cold", engine_name)
    async with trio.open_nursery() as nursery:
        await rig.use(nursery)
        async with trio.open_nursery() as putters:
            for size in (0, 1, 4096, 100_000, 3 << 20, 8 << 20):
                putters.start_soon(rig.put, size)
        rig.make_directory()
        known: dict[int, BlockMeta] = dict(rig.blocks)
        for generation in known:
            await rig.check(generation)
        assert rig.tier.statistics()[0].engine == engine_name
        await rig.tier.close()
        nursery.cancel_scope.cancel()
    rig.device.close()
    async with trio.open_nursery() as nursery:
        recovered = await rig.use(nursery)
        assert recovered.blocks == known
        assert len(recovered.directories) == 1
        for generation in known:
            await rig.check(generation)
        nursery.cancel_scope.cancel()
    rig.device.close()
