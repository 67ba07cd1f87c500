"""What shares blocks with other members: parts that know nothing of each other, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ctxfs.core.block import Block
from ctxfs.core.members import Membership
from ctxfs.settings import ClusterConfig
from ctxfs.store.amending import Amending
from ctxfs.store.assuring import Assuring
from ctxfs.store.deletions import Deletions
from ctxfs.store.elsewhere import Elsewhere
from ctxfs.store.receiving import Receiver
from ctxfs.store.replicating import Replicator
from ctxfs.store.serving import Serving
from ctxfs.store.store import Store
from mountd.repairing import Repairer

SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Parts:
    """What shares blocks, while this daemon does."""

    deletions: Deletions
    serving: Serving
    receiver: Receiver
    replicator: Replicator
    amending: Amending
    repairer: Repairer
    assuring: Assuring
    elsewhere: Elsewhere

    def connect(self, store: Store, is_first_home: Callable[[Block], bool]) -> None:
        """Have each hear of what others do."""
        catalog, replicator = store.catalog, self.replicator
        self.deletions.was_offered = self.serving.was_offered = replicator.was_offered
        self.amending.was_offered = replicator.was_offered
        catalog.block_sealed = replicator.sealed
        catalog.block_amended = self.amending.amended
        catalog.directory_made = replicator.directory_made
        self.receiver.behind = self.amending.behind
        self.receiver.beats = self.amending.beats

        def replicate(block: Block) -> None:
            if is_first_home(block):  # one of those who hear of it is enough
                replicator.replicate(block)

        self.receiver.replicas_changed = replicate
        store.sealing.assurance = self.assuring
        store.join(self.elsewhere)

    def apply(self, config: ClusterConfig, members: Membership) -> None:
        """Go by what may be changed while running."""
        self.deletions.keep_ns = config.tombstone_keep_ns
        self.elsewhere.missing_s = config.missing_keep_ns / SECOND_NS
        self.assuring.is_wanted = config.fsync == "replicas"
        self.assuring.deadline_s = config.fsync_deadline_ns / SECOND_NS
        self.repairer.apply(config.replicas, config.repair_bytes_per_s, members)

    def retry(self) -> None:
        """Members came or went."""
        self.replicator.retry()
        self.amending.retry()

    def counters(self) -> dict[str, int]:
        """Numbers that only grow, by the names of ctxfs(7)."""
        sent, told, here = self.replicator.counters, self.amending.counters, self.receiver.counters
        return {
            "had": sent.had,
            "failed": sent.failed,
            "left_to_repair": sent.left_to_repair + told.left_to_repair,
            "sent_ahead": sent.ahead,
            "repaired": self.repairer.repaired,
            "received": here.received,
            "received_bytes": here.received_bytes,
            "received_corrupt": here.corrupt,
            "received_no_room": here.no_room,
            "amended": told.amended,
            "amended_by_others": here.amended,
            "amends_untold": told.untold,
            "fsync_waits": self.assuring.counters.waited,
            "fsync_missing": self.assuring.counters.missing,
        }

    def state(self) -> dict[str, int]:
        """Numbers of now."""
        return {
            "waiting": self.replicator.waiting,
            "amends_waiting": self.amending.waiting,
            "tombstones": len(self.deletions.table),
            "elsewhere": len(self.elsewhere),
        }
