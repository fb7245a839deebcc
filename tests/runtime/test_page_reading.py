"""Rows are read whole and in order; sums are what plain arithmetic says, and tell apart rows that differ."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.runtime.page_reading import row_sums, sum_keys

RANGE = 1 << 64


def split_mix(words: int) -> Iterator[int]:
    """SplitMix64 from the state 0, as its authors give it; odd."""
    state = 0
    for _ in range(2 * words):
        state = (state + 0x9E3779B97F4A7C15) % RANGE
        value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % RANGE
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % RANGE
        yield (value ^ (value >> 31)) | 1


def plain(row: bytes) -> bytes:
    """The sums of one row, by integers of any size."""
    whole = row + bytes(-len(row) % 4)
    words = [int.from_bytes(whole[i : i + 4], "little", signed=True) for i in range(0, len(whole), 4)]
    keys = list(split_mix(len(words)))
    sums = [sum(word * key for word, key in zip(words, keys[lane::2], strict=True)) % RANGE for lane in range(2)]
    return b"".join(one.to_bytes(8, "little") for one in sums)


@given(st.lists(st.binary(min_size=1, max_size=70), min_size=1, max_size=5).map(lambda rows: [
    (row * 70)[: len(rows[0])] for row in rows
]))  # fmt: skip
def test_sums_are_those_of_plain_arithmetic(rows: list[bytes]) -> None:
    array = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
    assert [row.tobytes() for row in row_sums(array)] == [plain(row) for row in rows]


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize("nbytes", [1, 30, 64])
def test_rows_that_are_summed_in_parts_have_the_sums_of_all(
    at_once: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.runtime.page_reading._SUMMED_BYTES", at_once)
    rows = np.random.default_rng(nbytes).integers(0, 256, (11, nbytes), np.uint8)
    assert [row.tobytes() for row in row_sums(rows)] == [plain(row.tobytes()) for row in rows]


def test_what_two_hosts_send_each_other_does_not_change_with_a_version() -> None:
    rows = np.arange(2 * 10, dtype=np.uint8).reshape(2, 10) * 13
    assert row_sums(rows).tobytes().hex() == FIXED


FIXED = "043c7fc912d1d0299c98b4c59bb024aab6c9b9ce313ad51fb62e43ecd0f290f6"
"""The sums of two rows of ten bytes."""


@pytest.mark.parametrize("nbytes", [1, 4, 30, 256])
def test_one_word_that_differs_always_shows(nbytes: int) -> None:
    chance = random.Random(nbytes)
    row = np.frombuffer(chance.randbytes(nbytes), np.uint8).copy()
    before = row_sums(row[None])
    for bit in range(nbytes * 8):
        row[bit // 8] ^= 1 << (bit % 8)
        after = row_sums(row[None])
        assert (before[0, :8] != after[0, :8]).any()
        assert (before[0, 8:] != after[0, 8:]).any()
        row[bit // 8] ^= 1 << (bit % 8)


def test_words_that_change_places_or_their_highest_bits_show() -> None:
    """What a sum with equal or even keys would not see."""
    words = np.arange(1, 257, dtype=np.uint32).view(np.uint8).reshape(1, -1)
    seen = {row_sums(words).tobytes()}
    for place in range(255):
        changed = words.view(np.uint32).copy()
        changed[0, [place, place + 1]] = changed[0, [place + 1, place]]
        seen.add(row_sums(changed.view(np.uint8)).tobytes())
        changed = words.view(np.uint32).copy()
        changed[0, [place, place + 1]] ^= np.uint32(1 << 31)
        seen.add(row_sums(changed.view(np.uint8)).tobytes())
    assert len(seen) == 1 + 2 * 255


def test_keys_are_odd_all_different_and_those_of_a_longer_row_begin_with_them() -> None:
    keys = sum_keys(4096)
    assert (keys & 1).all()
    assert np.unique(keys).size == keys.size
    assert (sum_keys(100) == keys[:100]).all()
