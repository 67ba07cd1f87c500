"""Await, and learn whether that put the task to sleep."""

from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def noticing(
    steps: Coroutine[Any, Any, T], suspended: Callable[[], None]
) -> Generator[Any, Any, T]:
    """Await `steps`; call `suspended` just before it puts the task to sleep for the first time.

    Most operations end without; this tells the two apart without a task for each.
    """
    try:
        trap = steps.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    suspended()
    # From here on this is `yield from`, which cannot be begun in the middle.
    while True:
        try:
            told = yield trap
        except BaseException as error:
            step, argument = steps.throw, error
        else:
            step, argument = steps.send, told  # type: ignore[assignment]
        try:
            trap = step(argument)
        except StopIteration as done:
            result = done.value
            return result
