"""SHA-256 as S3's headers carry it, and as `ObjectInfo` shows it."""

import base64
import hashlib


def base64_sha256(data: bytes | memoryview) -> str:
    """As the `x-amz-checksum-sha256` header carries it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def checksum_to_hex(value: str | None) -> str | None:
    """`<base64>` or composite `<base64>-<parts>` to the form of `ObjectInfo.sha256`; None stays None."""
    if not value:
        return None
    digest, dash, parts = value.partition("-")
    try:
        return f"{base64.b64decode(digest, validate=True).hex()}{dash}{parts}"
    except ValueError:
        return None
