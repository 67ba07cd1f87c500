"""What the kernel was told of names and attributes, and may still believe.

The daemon remembers what it let the kernel cache, and takes it back when it is no longer so. No
notice is sent of what the kernel never heard, or of what it has changed itself.

Names are taken back all at once, by the *epoch*: that takes no lock in the kernel, so it is done in
line, before whoever changed the name is answered. To take back one name alone, the kernel locks the
directory, which may be held by somebody who waits for our answer; a daemon that is killed while it
waits there could not even die. Few changes need it: most names that change are changed through
the kernel, or were not looked up for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mountd.fuseproto import notices

Place = tuple[int, bytes]  # a directory's inode, and a name in it

SECOND_NS = 1_000_000_000
NAMES_MAX = 1 << 15  # remembered; beyond, all are taken back
ATTRIBUTES_MAX = 1 << 13  # remembered of each half; beyond, the kernel is to believe none
# A lifetime begins when the caller gets to see the answer, which may be later than it was sent.
LATE_NS = 2 * SECOND_NS


class Beliefs:
    """Names and attributes that the kernel may believe. To be asked from one loop alone."""

    def __init__(
        self,
        notify: Callable[[bytes], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._notify = notify
        self._clock_ns = clock_ns
        self._names: dict[Place, int] = {}  # until when
        self._attributes_ns = 0  # how long attributes are believed at most
        self._recent: set[int] = set()  # inodes whose attributes were told since the last turn
        self._former: set[int] = set()  # and in the turn before that
        self._turn_ns = 0
        self._unknown_until_ns = 0
        # Directories of which the kernel forgets the attributes by itself.
        self._forgotten: tuple[int, ...] = ()
        self.names_are_told = False

    def begin(self, attributes_s: float, *, names: bool) -> None:
        """`attributes_s`: the longest lifetime of attributes. `names`: whether any are told."""
        self.names_are_told = names
        self._attributes_ns = int(attributes_s * SECOND_NS) + LATE_NS

    def resume(self) -> None:
        """A daemon before us told the kernel we do not know what."""
        self._unknown_until_ns = self._clock_ns() + self._attributes_ns
        if self.names_are_told:
            self.take_back_names()

    def end(self) -> None:
        """The mount has ended: nobody is there to believe anything."""
        self._names.clear()
        self._recent.clear()
        self._former.clear()
        self._unknown_until_ns = 0

    # -- names

    def tell_name(self, place: Place, seconds: float) -> None:
        """The kernel is about to hear where a name leads, or that it leads nowhere."""
        if len(self._names) >= NAMES_MAX:
            self.take_back_names()
        self._names[place] = self._clock_ns() + int(seconds * SECOND_NS) + LATE_NS

    def forget_name(self, place: Place) -> None:
        """The kernel is about to hear of a node that it never knew by this name, for no time.

        Whatever it believed before goes with that, on its way or not.
        """
        self._names.pop(place, None)

    def name_changed(self, directory: int, name: bytes) -> None:
        """A name leads elsewhere, or nowhere, from now on."""
        until_ns = self._names.pop((directory, name), None)
        if until_ns is not None and until_ns > self._clock_ns():
            self.take_back_names()

    def take_back_names(self) -> None:
        """The kernel is to ask for each name again."""
        self._names.clear()
        self._notify(notices.names_changed())

    @contextmanager
    def changed_by_kernel(self, *places: Place) -> Iterator[None]:
        """The kernel asks for a change of these names, and knows what follows for its cache."""
        believed = {place: until for place in places if (until := self._names.pop(place, None))}
        self._forgotten = tuple(directory for directory, _ in places)
        try:
            yield
        except BaseException:
            self._names.update(believed)
            raise
        finally:
            self._forgotten = ()

    @contextmanager
    def renamed_by_kernel(self, old: Place, new: Place) -> Iterator[None]:
        """The kernel asks for a rename or an exchange. What it believed moves with the names."""
        until = self._names.get(old), self._names.get(new)
        with self.changed_by_kernel(old, new):
            yield
        for place, until_ns in zip((new, old), until, strict=True):
            if until_ns is not None:
                self._names[place] = until_ns

    # -- attributes

    def tell_attributes(self, inode: int) -> bool:
        """The kernel is about to hear of them; False: it must not believe them for any time."""
        now_ns = self._clock_ns()
        if now_ns >= self._turn_ns:
            self._former, self._recent = self._recent, set()
            self._turn_ns = now_ns + self._attributes_ns
        if len(self._recent) >= ATTRIBUTES_MAX:
            return False
        self._recent.add(inode)
        return True

    def attributes_changed(self, inode: int) -> None:
        """Attributes of an inode are others from now on."""
        if inode in self._forgotten:
            return
        told = inode in self._recent or inode in self._former
        if told or self._unknown_until_ns > self._clock_ns():
            self._recent.discard(inode)
            self._former.discard(inode)
            self._notify(notices.attributes_changed(inode))
