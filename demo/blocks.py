"""KV blocks as files: their keys, how they are written, how they are read."""

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demo.transformer import MODEL_NAME, Stored

TOKENS = 64  # in a block; for this model 6 layers x (K, V) x 64 tokens x 384 x 2 B = 576 KiB


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block of one text. `parent` is the key of the block before it, "" for the first."""

    key: str
    parent: str
    tokens: tuple[int, ...]


def cut(tokens: list[int]) -> Iterator[Block]:
    """The whole blocks of a text; what is left over at its end is no block.

    A key is the SHA-256 of the key before it and the block's own token ids. Equal keys therefore
    mean: the same model read the same tokens from the very beginning, so K and V are the same.
    """
    parent = ""
    for begin in range(0, len(tokens) - TOKENS + 1, TOKENS):
        own = tokens[begin : begin + TOKENS]
        before = parent or MODEL_NAME
        text = np.array(own, dtype="<u4").tobytes()
        key = hashlib.sha256(before.encode() + b"\0" + text).hexdigest()
        yield Block(key, parent, tuple(own))
        parent = key


class Shelf:
    """A directory in which every file is a block: the mount, or a directory beneath it."""

    def __init__(self, path: Path, mount_point: Path) -> None:
        self.path = path
        # In ctxfs a key is the whole path below the mount, and `user.ctx.parent` is a key.
        self._prefix = "" if path == mount_point else f"{path.relative_to(mount_point)}/"

    def file(self, key: str) -> Path:
        return self.path / key

    def holds(self, key: str) -> bool:
        return self.file(key).exists()

    def put(self, block: Block, kv: Stored, *, ttl: str) -> None:
        """Write under a temporary name, describe it, and give it its name when it is whole."""
        temporary = self.path / f".{block.key}.tmp"
        with temporary.open("wb", buffering=0) as file:
            written = file.write(kv.data.cast("B"))
        if written != kv.nbytes:
            raise OSError(f"{temporary}: {written} of {kv.nbytes} bytes were taken")
        self.describe(temporary, "ttl", ttl)
        self.describe(temporary, "dtype", "bf16")
        if block.parent:
            self.describe(temporary, "parent", self._prefix + block.parent)
        temporary.rename(self.file(block.key))

    def get(self, key: str, shape: tuple[int, ...]) -> Stored:
        """Map the block. The array keeps the mapping alive; nothing is copied."""
        return map_tensor(self.file(key), shape)

    def describe(self, file: Path, name: str, value: str) -> None:
        os.setxattr(file, f"user.ctx.{name}", value.encode())

    def attribute(self, key: str, name: str) -> str:
        return os.getxattr(self.file(key), f"user.ctx.{name}").decode()


def map_tensor(path: Path, shape: tuple[int, ...]) -> Stored:
    """A read-only view of the bf16 tensor in `path`; its size must be that of `shape`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != 2 * int(np.prod(shape)):
            raise ValueError(f"{path} has {size} bytes, which is no tensor of shape {shape}")
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, dtype=np.uint16).reshape(shape)
