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
from mountd.session import SENT_BACK, NotedRedirect, Session
from mountd.values import Caller

LIFE_NS = 10_000_000_000  # of a thread that waits for the daemon alone; more on a starved host
RESTART_NS = 60_000_000_000  # at most, from the end of a daemon until the next one answers


class RetryLookup(Exception):
    """The name leads to another inode now; the kernel is to look it up again.

    Answered as ESTALE, which the kernel answers itself by walking the path once more.
    """


@dataclass(slots=True)
class Redirect:
    """From which block an open was sent on to which, if one was made for it."""

    block: Block | None  # None: the kernel had it from a daemon before this one
    instead: Block | None
    at_ns: int
    request: int  # that was answered so
    place: int = -1  # in the session file
    held: Handle | None = None  # what the second lookup found: it must last until the open


class Redirects:
    """At most one for each thread."""

    def __init__(self, store: Store, session: Session | None = None) -> None:
        """`session`: where they are noted for a daemon that takes over."""
        self._store = store
        self._session = session
        self._by_thread: dict[int, Redirect] = {}

    def __contains__(self, thread: int) -> bool:
        return thread in self._by_thread

    def begin(self, caller: Caller, block: Block | None, instead: Block | None = None) -> NoReturn:
        """Send a thread to look its name up again. Raises RetryLookup."""
        now_ns = self._store.catalog.clock().boot_ns
        if len(self._by_thread) >= SENT_BACK:  # of threads that did not come back
            for each, redirect in list(self._by_thread.items()):
                if now_ns - redirect.at_ns >= LIFE_NS:
                    self.end(each)
        self._add(caller.pid, Redirect(block, instead, now_ns, caller.request))
        raise RetryLookup

    def _add(self, thread: int, redirect: Redirect) -> None:
        self._by_thread[thread] = redirect
        if self._session is None:
            return
        numbers = _number(redirect.block), _number(redirect.instead), _held(redirect)
        redirect.place = self._session.add_redirect(
            NotedRedirect(thread, redirect.request, redirect.at_ns, *numbers)
        )

    def resume(self) -> None:
        """Wait for the opens that the daemon before this one sent back."""
        if self._session is None:
            return
        now_ns = self._store.catalog.clock().boot_ns
        for noted in self._session.take_redirects():
            if now_ns - noted.at_ns > RESTART_NS:
                continue
            block, instead, held = map(self._block, (noted.block, noted.instead, noted.held))
            redirect = Redirect(block, instead, now_ns, noted.request)
            if held is not None:
                redirect.held = self._store.upkeep.hold(held)
            self._add(noted.thread, redirect)

    def _block(self, generation: int) -> Block | None:
        node = self._store.catalog.names.by_inode.get(generation)
        return node if isinstance(node, Block) else None

    def looked_up(self, thread: int, place: tuple[Directory, bytes], node: Node | None) -> None:
        """A thread looked for a name, and is about to hear of `node`."""
        redirect = self._by_thread.get(thread)
        if redirect is None or isinstance(node, Directory):
            return  # on its way
        # Other hosts may have been asked, which takes as long as they do; the open comes at once.
        redirect.at_ns = self._store.catalog.clock().boot_ns
        instead = redirect.instead
        if instead is not None and place != (instead.directory, instead.name):
            # The block was renamed while it was opened. What was made under its new name is for
            # nobody, and this thread would find it there.
            self._let_go(redirect)
            redirect.instead = redirect.held = None
        elif redirect.held is None and node is not None:
            redirect.held = self._store.upkeep.hold(node)
        if self._session is not None:
            self._session.set_redirect(redirect.place, _number(redirect.instead), _held(redirect))

    def take(self, caller: Caller, block: Block | None) -> Redirect | None:
        """Return, and forget, that a thread was sent to look the name of this block up just now.

        It must not be sent again: the kernel hands a second ESTALE on to the program. Raises
        RetryLookup where the daemon before this one sent it back, and did not come to say so.
        """
        redirect = self._by_thread.get(caller.pid)
        if redirect is None:
            return None
        if redirect.request == caller.request != 0:
            raise RetryLookup
        self._forget(caller.pid)
        before = redirect.block  # it may have been renamed meanwhile
        same = (
            block is redirect.instead
            or before is None
            or block is None
            or (before.name == block.name and before.directory is block.directory)
        )
        recent = self._store.catalog.clock().boot_ns - redirect.at_ns < LIFE_NS
        if same and recent:
            return redirect
        self._let_go(redirect)
        return None

    def end(self, thread: int) -> None:
        """This thread opens something else."""
        redirect = self._forget(thread)
        if redirect is not None:
            self._let_go(redirect)

    def _forget(self, thread: int) -> Redirect | None:
        redirect = self._by_thread.pop(thread, None)
        if redirect is not None and self._session is not None:
            self._session.remove_redirect(redirect.place)
        return redirect

    def _let_go(self, redirect: Redirect) -> None:
        if redirect.held is not None:
            self._store.upkeep.let_go(redirect.held)
        if redirect.instead is not None:
            self._store.upkeep.discard_unopened(redirect.instead)


def _number(block: Block | None) -> int:
    return 0 if block is None else block.generation


def _held(redirect: Redirect) -> int:
    return 0 if redirect.held is None else redirect.held.block.generation
