"""Things that are dear to make and used by one thread at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Pool(Generic[T]):
    """Take one, use it, give it back. As many are kept as were ever in use together.

    `list.pop` and `list.append` are each one step to other threads, so there is no lock.
    """

    make: Callable[[], T]
    _idle: list[T] = field(default_factory=list)

    def take(self) -> T:
        try:
            return self._idle.pop()
        except IndexError:
            return self.make()

    def give(self, thing: T) -> None:
        self._idle.append(thing)
