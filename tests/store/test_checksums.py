"""The values that S3 documents for CRC-32 and for the checksums of uploads in parts, whoever computes them."""

import zlib

from trainer_sidecar.store.base import PART_UNIT, ObjectInfo
from trainer_sidecar.store.checksums import (
    base64_crc32,
    checksum_to_hex,
    comparable,
    composite_crc32,
    crc32,
    expected_crc32,
)
from trainer_sidecar.store.verify import Expected


def test_the_crc_is_the_one_of_zip_and_ethernet() -> None:
    assert f"{crc32(b'123456789'):08x}" == "cbf43926", "the check value of CRC-32/ISO-HDLC"
    for size in (0, 1, 31, 64 * 1024 + 7):
        data = bytes(i * 7 % 251 for i in range(size))
        assert crc32(memoryview(data)) == zlib.crc32(data)


def test_of_several_parts_it_is_the_crc_over_their_crcs() -> None:
    assert composite_crc32([0xCBF43926]) == "cbf43926"
    assert composite_crc32([1, 2]) == f"{zlib.crc32(bytes([0, 0, 0, 1, 0, 0, 0, 2])):08x}-2"
    assert expected_crc32(b"") == "00000000"
    data = bytes(PART_UNIT) + b"tail"
    assert expected_crc32(data) == composite_crc32([zlib.crc32(data[:PART_UNIT]), zlib.crc32(b"tail")])


def test_headers_carry_it_as_base64_of_four_bytes() -> None:
    assert base64_crc32(0xCBF43926) == "y/Q5Jg=="
    assert checksum_to_hex("y/Q5Jg==") == "cbf43926"
    assert checksum_to_hex("y/Q5Jg==-12") == "cbf43926-12"
    assert checksum_to_hex("no base64!") is None
    assert checksum_to_hex(None) is None


def test_a_checksum_of_the_whole_is_not_compared_with_one_of_parts() -> None:
    assert comparable("cbf43926-2", "00000000-2")
    assert not comparable("cbf43926", "00000000-2")
    assert not comparable("cbf43926-3", "00000000-2")
    assert not comparable(None, "00000000")
    assert not comparable("", "")


def test_an_object_is_judged_by_what_its_store_says_and_what_its_manifest_knows() -> None:
    shard = Expected("k", 9, crc32="cbf43926")
    assert shard.difference(ObjectInfo("k", 9, crc32="cbf43926")) == ""
    assert shard.difference(ObjectInfo("k", 9, crc32="cbf43927")) == "CRC-32 cbf43927"
    assert shard.difference(ObjectInfo("k", 8, crc32="cbf43926")) == "8 bytes"
    assert shard.difference(ObjectInfo("k", 9, sha256="00" * 32)) == ""
    assert str(shard) == "9 bytes with CRC-32 cbf43926"
    earlier = Expected("k", 9)
    assert earlier.difference(ObjectInfo("k", 9, crc32="cbf43927")) == ""
    document = Expected("k", 9, sha256="11" * 32)
    assert document.difference(ObjectInfo("k", 9, sha256="22" * 32)) == f"SHA-256 {'22' * 32}"
