"""Awaiting, and learning whether that put the task to sleep."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from mountd.noticing import noticing


async def test_what_ends_at_once_is_not_noticed() -> None:
    async def steps() -> int:
        return 7

    assert await noticing(steps(), lambda: pytest.fail("it did not sleep")) == 7


async def test_sleep_is_noticed_once_and_before_it_begins() -> None:
    seen: list[str] = []

    async def steps() -> str:
        seen.append("before")
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        seen.append("after")
        return "done"

    assert await noticing(steps(), lambda: seen.append("sleeps")) == "done"
    assert seen == ["before", "sleeps", "after"]


async def test_errors_and_cancellation_go_through_both_ways() -> None:
    async def fails() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        await noticing(fails(), lambda: None)
    ended: list[str] = []

    async def waits() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("cleaned up")

    with trio.CancelScope() as scope:
        await noticing(waits(), scope.cancel)
    assert scope.cancelled_caught
    assert ended == ["cleaned up"]


async def test_an_error_caught_inside_does_not_end_it(autojump_clock: MockClock) -> None:
    async def retries() -> str:
        with trio.move_on_after(1):
            await trio.sleep_forever()
        await trio.sleep(1)
        return "went on"

    assert await noticing(retries(), lambda: None) == "went on"
