"""A block's chunks, shared out among whatever threads the caller has."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from ctxfs.errors import CtxfsError

TASKS_MAX: Final = 16  # handed out at once, which bounds the memory for what is not yet written

T = TypeVar("T")


class Spread(Protocol):
    """What `map` does: results in order. An executor's `map` works on several at once."""

    def __call__(
        self, function: Callable[[Sequence[int]], Any], tasks: Iterable[Sequence[int]], /
    ) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class _Failed:
    error: CtxfsError


def spread_out(
    work: Callable[[Sequence[int]], T], chunks: int, batch: int, spread: Spread
) -> Generator[T, None, None]:
    """Results of `work` on the numbers of all chunks, in order, a batch to each call.

    An error is raised only when nothing runs any more: the memory that tasks write to is the
    caller's again then. Whoever stops listening early has to close this, which waits as well.
    """
    # A thread holds its last task a moment longer than the caller waits for it. What the task holds
    # goes with this, so that the memory behind can be unmapped at once.
    doing: list[Callable[[Sequence[int]], T]] = [work]
    del work

    def task(numbers: Sequence[int]) -> T | _Failed | None:
        try:
            # A copy, in one step: it may be emptied meanwhile, and then there is nothing to do.
            for each in doing[:]:
                return each(numbers)
        except CtxfsError as error:
            return _Failed(error)
        return None

    batches = [range(first, min(first + batch, chunks)) for first in range(0, chunks, batch)]
    try:
        for first in range(0, len(batches), TASKS_MAX):
            yield from _wave(spread(task, batches[first : first + TASKS_MAX]), doing)
    finally:
        doing.clear()


def _wave(results: Iterable[T | _Failed], doing: list[Any]) -> Generator[T, None, None]:
    """Hand results on; at the end, whatever it is, see to it that no task runs on."""
    wave = iter(results)
    try:
        for result in wave:
            if isinstance(result, _Failed):
                raise result.error
            yield result
    except BaseException:
        doing.clear()
        raise
    finally:
        for _ in wave:
            pass
