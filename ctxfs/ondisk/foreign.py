"""Whose data a device holds, as far as its first bytes tell."""

from typing import Final

from ctxfs.ondisk.layout import Bytes

# What is looked at: the superblocks' megabyte. Backup copies at a device's end do not matter.
LOOKED_AT_BYTES: Final = 1 << 20

# Offset, bytes, name. From the systems' own headers and util-linux' libblkid; the more telling
# come first, since a partition table's mark also ends many boot sectors.
_SIGNATURES: Final = (
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0, b"XFSB", "an XFS file system"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (512, b"LABELONE", "an LVM physical volume"),
    (0, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (4096, b"\xfc\x4e\x2b\xa9", "a Linux RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "a Linux RAID member"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"),
    (0, b"bluestore block device", "a Ceph BlueStore"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (54, b"FAT1", "a FAT file system"),
    (0, b"hsqs", "a SquashFS image"),
    (32769, b"CD001", "an ISO 9660 image"),
    (0, b"QFI\xfb", "a QEMU disk image"),
    (0, b"\x7fELF", "a program"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file"),
    (257, b"ustar", "a tar archive"),
    (510, b"\x55\xaa", "a partition table or boot sector"),
)
# ZFS keeps uberblocks in a ring from 128 KiB on, in either byte order.
_ZFS_RING: Final = range(128 << 10, 256 << 10, 1024)
_ZFS_MAGICS: Final = (bytes.fromhex("0cb1ba0000000000"), bytes.fromhex("0000000000bab10c"))


def name_of(start: Bytes) -> str | None:
    """What the first megabyte of a device holds, in words; None where it is all zero."""
    data = bytes(memoryview(start)[:LOOKED_AT_BYTES])
    if not any(data):
        return None
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset):
            return name
    if any(data.startswith(_ZFS_MAGICS, offset) for offset in _ZFS_RING):
        return "a ZFS member"
    return "data that is not ours"
