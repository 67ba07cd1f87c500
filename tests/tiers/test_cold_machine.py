"""Any sequence of puts, drops, changes, failures, crashes and restarts, against a model.

What the model knows of a block: every version of its attributes since the last sync, or that it
may or must not be there. After a crash each block must be one of the versions it may be, with the
right bytes. A block whose put failed may be there: its records may have arrived all the same, and
what revokes them is on the medium with the next sync.
"""

import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctxfs.core.meta import BlockMeta
from ctxfs.errors import DeviceError, NoSuchDevice, TierFull
from ctxfs.tiers.cold import TablePolicy
from tests.tiers.cold_devices import add, drain, homes
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, engine, meta

_SIZES = st.one_of(
    st.sampled_from([0, 1, 4096, SEGMENT, 2 * SEGMENT + 1]), st.integers(0, SEGMENT // 2)
)


class _Clock(trio.abc.Clock):
    """One clock for many runs of the loop; between them so much time goes by that a device which
    is left alone is tried again."""

    def __init__(self) -> None:
        self.now = 0.0

    def start_clock(self) -> None:
        self.now += 100

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return 0 if deadline <= self.now else deadline - self.now


class ColdMachine(RuleBasedStateMachine):
    """`self.rig.blocks` is what is live; `self.allowed` what a crash may make of each generation:
    versions of its attributes, and None for gone. `self.sizes` has all that was ever put."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        devices=st.integers(1, 2),
        tables=st.sampled_from([None, OFTEN]),
    )
    def begin(self, seed: int, devices: int, tables: TablePolicy | None) -> None:
        self.random = random.Random(seed)
        self.clock = _Clock()
        self.rig = Rig(*(engine(10, seed=seed + at) for at in range(devices)), tables=tables)
        self.allowed: dict[int, list[BlockMeta | None]] = {}
        self.sizes: dict[int, int] = {}
        self.allowed_directories: dict[int, set[int | None]] = {}
        self.run(self.rig.open)

    def run(self, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        return trio.run(call, *args, clock=self.clock)

    def _pick(self) -> int:
        return self.random.choice(sorted(self.rig.blocks))

    @rule(size=_SIZES, shared=st.booleans())
    def put(self, size: int, shared: bool) -> None:
        key = b"shared" if shared and not self._holds_shared() else None
        generation = self.rig.next_number()
        block = meta(generation, self.rig.next_stamp(), size, key)
        with contextlib.suppress(TierFull, DeviceError):
            self.run(self._put, block)

    async def _put(self, block: BlockMeta) -> None:
        """Whatever becomes of it, it may be found: what failed may have arrived."""
        self.allowed.setdefault(block.generation, [None]).append(block)
        self.sizes[block.generation] = block.size
        await self.rig.put_again(block)

    @precondition(lambda self: self._absent())
    @rule(deadline=st.integers(1, 100))
    def put_again(self, deadline: int) -> None:
        """What failed, was dropped or was lost, with other attributes than before."""
        generation = self.random.choice(self._absent())
        block = meta(generation, self.rig.next_stamp(), self.sizes[generation])
        with contextlib.suppress(TierFull, DeviceError):
            self.run(self._put, replace(block, expires_ns=deadline))

    @precondition(lambda self: self.sizes)
    @rule(there=st.booleans())
    def put_copy(self, there: bool) -> None:
        """The content of a block that is there, or was, under another name."""
        chosen = self._pick() if there and self.rig.blocks else self.random.choice([*self.sizes])
        self.rig.copies += 1
        generation = chosen + (self.rig.copies << 40)
        block = meta(generation, self.rig.next_stamp(), self.sizes[chosen])
        with contextlib.suppress(TierFull, DeviceError):
            self.run(self._put, block)

    def _absent(self) -> list[int]:
        return sorted(set(self.sizes) - set(self.rig.blocks))

    def _holds_shared(self) -> bool:
        return any(block.key == b"shared" for block in self.rig.blocks.values())

    @rule(sizes=st.lists(st.integers(0, 30_000), min_size=2, max_size=8))
    def put_several_at_once(self, sizes: list[int]) -> None:
        blocks = [meta(self.rig.next_number(), self.rig.next_stamp(), size) for size in sizes]

        async def put(block: BlockMeta) -> None:
            with contextlib.suppress(TierFull, DeviceError):
                await self._put(block)

        async def put_all() -> None:
            async with trio.open_nursery() as nursery:
                for block in blocks:
                    nursery.start_soon(put, block)
                nursery.start_soon(self._sync_or_not)

        self.run(put_all)

    async def _sync_or_not(self) -> None:
        with contextlib.suppress(TierFull, DeviceError):
            await self.rig.tier.sync()

    @precondition(lambda self: self.rig.blocks)
    @rule()
    def drop(self) -> None:
        generation = self._pick()
        self.rig.drop(generation)
        self.allowed[generation].append(None)

    @precondition(lambda self: self.rig.blocks)
    @rule(count=st.integers(2, 30))
    def drop_many(self, count: int) -> None:
        for _ in range(min(count, len(self.rig.blocks))):
            self.drop()

    @precondition(lambda self: self.rig.blocks)
    @rule(deadline=st.integers(1, 100))
    def change(self, deadline: int) -> None:
        generation = self._pick()
        changed = self.rig.change(generation, expires_ns=deadline)
        self.allowed[generation].append(changed)

    @rule()
    def make_directory(self) -> None:
        inode = self.rig.make_directory()
        self.allowed_directories[inode] = {None, inode}

    @precondition(lambda self: self.rig.directories)
    @rule()
    def remove_directory(self) -> None:
        inode = self.random.choice(sorted(self.rig.directories))
        self.rig.remove_directory(inode)
        self.allowed_directories[inode].add(None)

    @rule()
    def sync(self) -> None:
        try:
            self.run(self.rig.tier.sync)
        except (DeviceError, TierFull):
            return
        self._all_is_certain()

    @rule()
    def tend(self) -> None:
        """Summaries and checkpoints are written, segments are made free."""
        with contextlib.suppress(DeviceError, TierFull):
            self.run(self.rig.tend)

    @precondition(lambda self: self.rig.blocks)
    @rule()
    def sync_one(self) -> None:
        generation = self._pick()
        try:
            self.run(self.rig.tier.sync, generation)
        except (DeviceError, TierFull):
            return
        self.allowed[generation] = [self.rig.blocks[generation]]

    def _all_is_certain(self) -> None:
        self.allowed = {
            generation: [self.rig.blocks.get(generation)] for generation in self.allowed
        }
        self.allowed_directories = {
            inode: {inode if inode in self.rig.directories else None}
            for inode in self.allowed_directories
        }

    @rule()
    def fill_up(self) -> None:
        try:
            while True:
                block = meta(self.rig.next_number(), self.rig.next_stamp(), 50_000)
                self.run(self._put, block)
        except (TierFull, DeviceError):
            pass

    @rule(share=st.sampled_from([0.02, 0.3]), what=st.sampled_from(["read", "write", "sync"]))
    def fail_sometimes(self, share: float, what: str) -> None:
        for device in self.rig.engines:
            setattr(device, f"fail_{what}", lambda offset: self.random.random() < share)

    @rule()
    def work_again(self) -> None:
        for device in self.rig.engines:
            device.fail_read = device.fail_write = device.fail_sync = lambda offset: False

    @rule()
    def crash(self) -> None:
        self.run(self.rig.crash)
        self._check_recovered()

    @rule(
        full=st.booleans(),
        requests=st.integers(0, 30),
        sizes=st.lists(st.integers(0, 60_000), max_size=12),
    )
    def lose_power_in_the_middle(self, full: bool, requests: int, sizes: list[int]) -> None:
        if full:  # so that it happens while something is carried over or erased
            self.fill_up()
            if self.rig.blocks:
                self.drop_many(len(self.rig.blocks) // 2)
            self.sync()
        for device in self.rig.engines:
            device.requests_left = requests
        if sizes:
            self.put_several_at_once(sizes)
        self.crash()

    @rule(
        device=st.integers(0, 2),
        sizes=st.lists(st.integers(0, 30_000), max_size=6),
        ended=st.booleans(),
    )
    def drain_in_use(self, device: int, sizes: list[int], ended: bool) -> None:
        """Into the others, while blocks come, go and change; until it stops, or is ended."""
        end: Callable[[], object] = lambda: None  # noqa: E731
        blocks = [meta(self.rig.next_number(), self.rig.next_stamp(), size) for size in sizes]

        async def put(block: BlockMeta) -> None:
            with contextlib.suppress(TierFull, DeviceError):
                await self._put(block)

        async def empty() -> None:
            with trio.CancelScope() as scope:
                nonlocal end
                end = scope.cancel
                with contextlib.suppress(TierFull, DeviceError, NoSuchDevice):
                    await drain(self.rig, f"memory{device}")
            if scope.cancelled_caught:
                with contextlib.suppress(NoSuchDevice):
                    self.rig.tier.end_drain(f"memory{device}")

        async def use() -> None:
            for _ in range(5):
                for _ in range(self.random.randrange(10)):
                    await trio.lowlevel.checkpoint()
                if self.rig.blocks:
                    self.random.choice([self.drop, lambda: self.change(7)])()
            if ended:
                end()

        async def all_of_it() -> None:
            async with trio.open_nursery() as nursery:
                for block in blocks:
                    nursery.start_soon(put, block)
                nursery.start_soon(empty)
                nursery.start_soon(use)

        self.run(all_of_it)

    @rule(device=st.integers(0, 2), requests=st.integers(0, 40))
    def lose_power_while_draining(self, device: int, requests: int) -> None:
        self.sync()
        for each in self.rig.engines:
            each.requests_left = requests
        self.drain_in_use(device, [], False)
        self.crash()

    @precondition(lambda self: len(self.rig.engines) < 3)
    @rule(seed=st.integers(0, 2**32 - 1))
    def add_device(self, seed: int) -> None:
        self.run(add, self.rig, engine(10, seed=seed))

    @rule(device=st.integers(0, 2), segments=st.integers(0, 3))
    def grow(self, device: int, segments: int) -> None:
        if device >= len(self.rig.engines):
            return
        grown = self.rig.engines[device]
        grown.grow(grown.size_bytes + segments * SEGMENT)
        with contextlib.suppress(DeviceError, NoSuchDevice):
            self.run(self.rig.tier.grow_device, f"memory{device}", grown.size_bytes)

    @rule()
    def restart(self) -> None:
        self.work_again()
        self.sync()
        self.run(self.rig.restart)
        self._check_recovered()

    def _check_recovered(self) -> None:
        recovered = self.rig.recovered
        for generation, allowed in self.allowed.items():
            found = recovered.blocks.get(generation)
            assert found in allowed, f"{generation}: {found} is none of {allowed}"
        assert set(recovered.blocks) <= set(self.allowed)
        found_directories = {directory.inode for directory in recovered.directories}
        for inode, choices in self.allowed_directories.items():
            assert (inode if inode in found_directories else None) in choices
        for generation in recovered.blocks:
            self.run(self.rig.check, generation)
        # What was found counts as kept: recovery has flushed it.
        self._all_is_certain()

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_accounts()

    @invariant()
    def no_block_is_twice(self) -> None:
        if hasattr(self, "rig"):
            for generation in self.rig.blocks:
                assert len(homes(self.rig, generation)) == 1

    @invariant()
    def some_block_reads_right(self) -> None:
        if hasattr(self, "rig") and self.rig.blocks:
            with contextlib.suppress(DeviceError):
                self.run(self.rig.check, self._pick())


TestColdMachine = ColdMachine.TestCase
TestColdMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    # The steps as they were found, at once: to shrink them may take longer than a test may.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
