"""Signatures of others are known by name."""

import pytest

from ctxfs.ondisk.foreign import LOOKED_AT_BYTES, name_of


@pytest.mark.parametrize(
    ("offset", "signature", "name"),
    [
        (0, b"XFSB", "an XFS file system"),
        (0, b"LUKS\xba\xbe", "a LUKS volume"),
        (510, b"\x55\xaa", "a partition table or boot sector"),
        (512, b"EFI PART", "a GPT partition table"),
        (512, b"LABELONE", "an LVM physical volume"),
        (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
        (4086, b"SWAPSPACE2", "swap space"),
        (0x10040, b"_BHRfS_M", "a Btrfs file system"),
        (200 << 10, bytes.fromhex("0cb1ba0000000000"), "a ZFS member"),
        (777_777, b"x", "data that is not ours"),
    ],
)
def test_signature_is_named(offset: int, signature: bytes, name: str) -> None:
    start = bytearray(LOOKED_AT_BYTES)
    start[offset : offset + len(signature)] = signature
    assert name_of(start) == name


def test_gpt_goes_before_its_protective_partition_table() -> None:
    start = bytearray(LOOKED_AT_BYTES)
    start[510:520] = b"\x55\xaaEFI PART"
    assert name_of(start) == "a GPT partition table"


def test_zeros_are_nobodys() -> None:
    assert name_of(bytes(LOOKED_AT_BYTES)) is None
