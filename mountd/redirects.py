"""Opens that were told to look their name up again, by the thread that opens.

An open that is to have another block than the kernel found is answered with ESTALE; the kernel
walks the path once more, and finds that block. The thread is the same, and does nothing else in
between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from ctxfs.core.block import Block, Directory, Node
from ctxfs.store.handle import Handle
from ctxfs.store.store import Store

LIFE_NS = 1_000_000_000
MAX = 1024


class RetryLookup(Exception):
    """The name leads to another inode now; the kernel is to look it up again.

    Answered as ESTALE, which the kernel answers itself by walking the path once more.
    """


@dataclass(slots=True)
class Redirect:
    """From which block an open was sent on to which, if one was made for it."""

    block: Block
    instead: Block | None
    at_ns: int
    held: Handle | None = None  # what the second lookup found: it must last until the open


class Redirects:
    """At most one for each thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_thread: dict[int, Redirect] = {}

    def __contains__(self, thread: int) -> bool:
        return thread in self._by_thread

    def begin(self, thread: int, block: Block, instead: Block | None = None) -> NoReturn:
        """Send a thread to look its name up again. Raises RetryLookup."""
        now_ns = self._store.catalog.clock().boot_ns
        if len(self._by_thread) >= MAX:  # of threads that did not come back
            for each, redirect in list(self._by_thread.items()):
                if now_ns - redirect.at_ns >= LIFE_NS:
                    self.end(each)
        self._by_thread[thread] = Redirect(block, instead, now_ns)
        raise RetryLookup

    def looked_up(self, thread: int, place: tuple[Directory, bytes], node: Node | None) -> None:
        """A thread looked for a name, and is about to hear of `node`."""
        redirect = self._by_thread.get(thread)
        if redirect is None or isinstance(node, Directory):
            return  # on its way
        instead = redirect.instead
        if instead is not None and place != (instead.directory, instead.name):
            # The block was renamed while it was opened. What was made under its new name is for
            # nobody, and this thread would find it there.
            self._let_go(redirect)
            redirect.instead = redirect.held = None
        elif redirect.held is None and node is not None:
            redirect.held = self._store.upkeep.hold(node)

    def take(self, thread: int, block: Block) -> Redirect | None:
        """Return, and forget, that a thread was sent to look the name of this block up just now.

        It must not be sent again: the kernel hands a second ESTALE on to the program.
        """
        redirect = self._by_thread.pop(thread, None)
        if redirect is None:
            return None
        before = redirect.block  # it may have been renamed meanwhile
        same = block is redirect.instead or (
            before.name == block.name and before.directory is block.directory
        )
        recent = self._store.catalog.clock().boot_ns - redirect.at_ns < LIFE_NS
        if same and recent:
            return redirect
        self._let_go(redirect)
        return None

    def end(self, thread: int) -> None:
        """This thread opens something else."""
        redirect = self._by_thread.pop(thread, None)
        if redirect is not None:
            self._let_go(redirect)

    def _let_go(self, redirect: Redirect) -> None:
        if redirect.held is not None:
            self._store.upkeep.let_go(redirect.held)
        if redirect.instead is not None:
            self._store.upkeep.discard_unopened(redirect.instead)
