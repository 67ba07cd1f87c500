"""Requests that wait too long: who is ended when, and with what."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from ctxfs.core.namespace import Namespace
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.store.counters import Counters
from ctxfs.store.events import Events
from mountd.deadlines import PATIENCE, Deadlines
from tests.store.world import FakeClock

DEADLINE_S = 10.0


class Store:
    """As much of a catalog as is looked at."""

    def __init__(self) -> None:
        self.device = SimpleNamespace(written_bytes=0, read_bytes=0)
        self.events = Events(10)
        self.counters = Counters()
        self.clock = FakeClock()
        self.names = Namespace()
        self.cold = SimpleNamespace(statistics=lambda: [self.device])

    def deadlines(self, *, trouble_is_error: bool = False) -> Deadlines:
        return Deadlines(
            cast(Catalog, self), deadline_s=DEADLINE_S, trouble_is_error=trouble_is_error
        )


@pytest.fixture
def store() -> Store:
    return Store()


async def test_what_waits_too_long_is_ended_once_counted_and_told(
    store: Store, autojump_clock: MockClock
) -> None:
    deadlines = store.deadlines()
    ended: list[CtxfsError] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        waiter = deadlines.begin("CREATE", 1, ended.append, name=b"key")
        await trio.sleep(DEADLINE_S * 0.9)
        assert deadlines.statistics() == {"waiting": 1, "longest_s": DEADLINE_S * 0.9}
        assert not ended
        await trio.sleep(DEADLINE_S * 5)
        deadlines.over(waiter)
        nursery.cancel_scope.cancel()
    assert [error.code for error in ended] == [errno.ETIMEDOUT]
    assert (store.counters.overdue, store.counters.trouble) == (1, 0)
    event = json.loads(store.events.recent())
    assert (event["event"], event["key"], event["operation"]) == ("overdue", "key", "CREATE")
    assert DEADLINE_S <= event["waited_s"] <= DEADLINE_S * 1.2
    assert deadlines.statistics() == {"waiting": 0, "longest_s": 0.0}


async def test_what_ends_in_time_is_left_alone(store: Store, autojump_clock: MockClock) -> None:
    deadlines = store.deadlines()
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        waiter = deadlines.begin("OPEN", 1, lambda error: pytest.fail("it was in time"))
        await trio.sleep(DEADLINE_S * 0.9)
        deadlines.over(waiter)
        await trio.sleep(DEADLINE_S)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("trouble_is_error", "code"), [(False, errno.ENOENT), (True, errno.ETIMEDOUT)]
)
async def test_an_open_for_reading_is_a_miss_unless_trouble_is_an_error(
    store: Store, autojump_clock: MockClock, trouble_is_error: bool, code: int
) -> None:
    deadlines = store.deadlines(trouble_is_error=trouble_is_error)
    ended: list[CtxfsError] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        deadlines.begin("OPEN", 1, ended.append, is_reader=True)
        await trio.sleep(DEADLINE_S * 1.2)
        nursery.cancel_scope.cancel()
    assert [error.code for error in ended] == [code]
    assert store.counters.trouble == (code == errno.ENOENT)


async def test_what_moves_blocks_lasts_while_devices_answer_but_not_for_ever(
    store: Store, autojump_clock: MockClock
) -> None:
    deadlines = store.deadlines()
    impatient: list[CtxfsError] = []
    patient: list[CtxfsError] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        deadlines.begin("OPEN", 1, impatient.append)
        deadlines.begin("FSYNC", 1, patient.append, is_patient=True)
        for _ in range(6):
            await trio.sleep(DEADLINE_S / 2)
            store.device.written_bytes += 1
        assert len(impatient) == 1
        assert not patient
        await trio.sleep(DEADLINE_S * 1.5)  # nothing moves
        assert len(patient) == 1
        deadlines.begin("FSYNC", 1, patient.append, is_patient=True)
        for _ in range(2 * PATIENCE + 2):
            await trio.sleep(DEADLINE_S / 2)
            store.device.read_bytes += 1
        assert len(patient) == 2
        nursery.cancel_scope.cancel()


async def test_time_in_which_the_process_was_stopped_does_not_count(
    store: Store, mock_clock: MockClock
) -> None:
    deadlines = store.deadlines()
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        deadlines.begin("OPEN", 1, lambda error: pytest.fail("it had no time"))
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(DEADLINE_S * 1000)
        await trio.testing.wait_all_tasks_blocked()
        assert deadlines.statistics()["longest_s"] < DEADLINE_S
        nursery.cancel_scope.cancel()


async def test_another_deadline_holds_for_those_who_wait_already(
    store: Store, autojump_clock: MockClock
) -> None:
    deadlines = store.deadlines()
    ended: list[CtxfsError] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        deadlines.begin("WRITE", 1, ended.append)
        await trio.sleep(1)
        deadlines.deadline_s = 2.0
        await trio.sleep(2.5)
        assert len(ended) == 1
        nursery.cancel_scope.cancel()
