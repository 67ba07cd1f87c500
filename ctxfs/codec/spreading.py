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

    stopped = False

    def task(numbers: Sequence[int]) -> T | _Failed | None:
        if stopped:
            return None
        try:
            return work(numbers)
        except CtxfsError as error:
            return _Failed(error)

    batches = [range(first, min(first + batch, chunks)) for first in range(0, chunks, batch)]
    for first in range(0, len(batches), TASKS_MAX):
        wave = iter(spread(task, batches[first : first + TASKS_MAX]))
        try:
            for result in wave:
                if isinstance(result, _Failed):
                    raise result.error
                yield result
        finally:
            stopped = True
            for _ in wave:
                pass
            stopped = False
