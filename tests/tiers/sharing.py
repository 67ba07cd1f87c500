"""Putting blocks as the store does that shares contents."""

from ctxfs.core.meta import BlockMeta
from ctxfs.errors import BlockNotFound, DeviceError
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_twins import Twin


async def share(tier: ColdTier, meta: BlockMeta, stored: memoryview) -> bool:
    """Put a block by the content of another one, if the tier has it stored just so.

    Raises TierFull, DeviceError.
    """
    twin = tier.twin(meta)
    if twin is None:
        return False
    with twin.held() as is_here:
        if is_here and await _is_same(twin, stored):
            await tier.put_alias(meta, twin)
            return True
    return False


async def _is_same(twin: Twin, stored: memoryview) -> bool:
    if twin.stored_bytes != len(stored):
        return False
    memory = Scratch(max(4096, len(stored)))
    try:
        await twin.read(memory.span(0, memory.length_bytes))
    except (DeviceError, BlockNotFound):
        return False
    return memory.view[: len(stored)] == stored


def aliases(tier: ColdTier) -> int:
    """How many blocks share the content of another one."""
    return sum(log.aliases for log in tier.statistics())


def live_bytes(tier: ColdTier) -> int:
    return sum(log.live_bytes for log in tier.statistics())
