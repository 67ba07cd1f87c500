"""The end of a mount, as pyfuse3 tells of it."""

from __future__ import annotations

import errno
import os
from typing import cast

import pyfuse3
import pytest
import trio

from mountd.channel_pyfuse3 import Pyfuse3Channel, Pyfuse3Mount
from mountd.operations import Operations


def serve_until(monkeypatch: pytest.MonkeyPatch, code: int) -> bool:
    """Let reading requests fail with `code`; whether that is taken for the mount's end."""

    async def read_requests() -> None:
        raise OSError(code, os.strerror(code))

    async def main(max_tasks: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_requests)

    async def serve() -> bool:
        with trio.CancelScope() as scope:
            await Pyfuse3Mount(Pyfuse3Channel(cast(Operations, None))).serve(scope)
        return scope.cancel_called

    monkeypatch.setattr(pyfuse3, "main", main)
    return trio.run(serve, strict_exception_groups=True)


def test_a_mount_that_goes_while_a_request_is_read_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert serve_until(monkeypatch, errno.ECONNABORTED)


def test_any_other_failure_to_read_is_not_taken_for_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ExceptionGroup):
        serve_until(monkeypatch, errno.EIO)
