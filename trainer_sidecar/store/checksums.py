"""The checksums by which a store judges what comes in, as values and as S3's headers carry them.

Documents are sent with their SHA-256, by which others name them. Shards are sent with CRC-32, part by part: their bytes
are proven by the SHA-256 of their leaves (datapath T10), and the store's check need only find damage on the way, as
cheaply as can be. S3 composes an upload's checksum from those of its parts (protocol G).
"""

import base64
import hashlib
from collections.abc import Sequence

from isal.isal_zlib import crc32  # five times zlib's rate, and without the GIL as well

from trainer_sidecar.store.base import part_size_for

__all__ = [
    "base64_crc32",
    "base64_sha256",
    "checksum_to_hex",
    "comparable",
    "composite_crc32",
    "crc32",
    "expected_crc32",
]


def expected_crc32(data: memoryview | bytes) -> str:
    """What a store says of `data` after `create_large`: 8 hex digits, or composite `<hex>-<parts>`."""
    view, size = memoryview(data), part_size_for(len(data))
    return composite_crc32([crc32(view[i : i + size]) for i in range(0, max(1, len(view)), size)])


def composite_crc32(sums: Sequence[int]) -> str:
    """Of an upload in parts `<hex>-<parts>`, the CRC-32 over the parts' CRC-32s, big-endian; of one part its own."""
    if len(sums) == 1:
        return f"{sums[0]:08x}"
    return f"{crc32(b''.join(n.to_bytes(4, 'big') for n in sums)):08x}-{len(sums)}"


def comparable(left: str | None, right: str | None) -> bool:
    """Whether two checksums are there and of one kind. Of an upload in parts, some stores show that of the whole."""
    return bool(left and right) and str(left).partition("-")[2] == str(right).partition("-")[2]


def base64_sha256(data: bytes | memoryview) -> str:
    """As the `x-amz-checksum-sha256` header carries it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def base64_crc32(value: int) -> str:
    """As the `x-amz-checksum-crc32` header carries it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def checksum_to_hex(value: str | None) -> str | None:
    """`<base64>` or composite `<base64>-<parts>` to the form of `ObjectInfo`; None stays None."""
    if not value:
        return None
    digest, dash, parts = value.partition("-")
    try:
        return f"{base64.b64decode(digest, validate=True).hex()}{dash}{parts}"
    except ValueError:
        return None
