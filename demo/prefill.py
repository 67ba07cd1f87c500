"""What an inference server does before it answers: have K and V for every token of the text."""

import hashlib
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.blocks import Block, Shelf, cut
from demo.transformer import Stored, Transformer


@dataclass(frozen=True, slots=True)
class Expected:
    """What a block must hold: its digest, and a plain copy of its tensor outside the mount."""

    key: str
    sha256: str
    copy: str
    shape: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Ledger:
    """What was found, what was not, what it took. Bytes, seconds."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_computing: float = 0.0
    seconds_writing: float = 0.0
    seconds_mapping: float = 0.0
    expected: dict[str, Expected] = field(default_factory=dict)


class Prefill:
    """Runs texts through the model, with the blocks on `shelf` as its memory."""

    def __init__(self, model: Transformer, shelf: Shelf, copies: Path, *, ttl: str) -> None:
        self.ledger = Ledger()
        self._model = model
        self._shelf = shelf
        self._copies = copies
        self._ttl = ttl

    def run(self, tokens: list[int]) -> list[tuple[Block, bool]]:
        """K and V for all whole blocks of `tokens`: each block, and whether it was there."""
        past = self._model.no_past()
        done: list[tuple[Block, bool]] = []
        for block in cut(tokens):
            hit = self._shelf.holds(block.key)
            kv = self._take(block) if hit else self._make(block, past)
            past = np.concatenate((past, kv), axis=2)
            done.append((block, hit))
        return done

    def _take(self, block: Block) -> Stored:
        before = time.perf_counter()
        kv = self._shelf.get(block.key, self.shape(block))
        self.ledger.seconds_mapping += time.perf_counter() - before
        self.ledger.hits += 1
        self.ledger.bytes_read += kv.nbytes
        return kv

    def _make(self, block: Block, past: Stored) -> Stored:
        before = time.perf_counter()
        kv = self._model.forward(list(block.tokens), past).kv
        computed = time.perf_counter()
        self._shelf.put(block, kv, ttl=self._ttl)
        self.ledger.seconds_writing += time.perf_counter() - computed
        self.ledger.seconds_computing += computed - before
        self.ledger.misses += 1
        self.ledger.bytes_written += kv.nbytes
        self._remember(block, kv)
        return kv

    def _remember(self, block: Block, kv: Stored) -> None:
        copy = self._copies / f"{block.key}.npy"
        np.save(copy, kv)
        digest = hashlib.sha256(kv.data.cast("B")).hexdigest()
        self.ledger.expected[block.key] = Expected(block.key, digest, str(copy), kv.shape)

    def shape(self, block: Block) -> tuple[int, ...]:
        return (self._model.layers, 2, len(block.tokens), self._model.hidden)
