"""Registered regions and the check before every submission, against plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.ranges import RegionTable, check_descriptors, split_rows

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8)
EVERYWHERE = RegionTable.of([Region(address=0, nbytes=1 << 40)])


def region_lists() -> st.SearchStrategy[list[Region]]:
    gaps = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 15)), max_size=4)

    def build(pieces: list[tuple[int, int]]) -> list[Region]:
        regions, at = [], 0
        for gap, nbytes in pieces:
            regions.append(Region(address=at + gap, nbytes=nbytes))
            at += gap + nbytes
        return regions

    return gaps.map(build)


@given(regions=region_lists(), rows=ROWS, data=st.data())
def test_outside_agrees_with_a_loop(regions: list[Region], rows: list[tuple[int, int]], data: st.DataObject) -> None:
    table = RegionTable.of(data.draw(st.permutations(regions)))
    bad = [
        index
        for index, (start, nbytes) in enumerate(rows)
        if not any(region.address <= start and start + nbytes <= region.stop for region in regions)
    ]
    starts, sizes = np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.int64)
    assert table.outside(starts, sizes) == (bad[0] if bad else None)


@given(rows=ROWS)
def test_writing_twice_is_found_exactly_when_a_byte_repeats(rows: list[tuple[int, int]]) -> None:
    written = [byte for start, nbytes in rows for byte in range(start, start + nbytes)]
    starts, sizes = [row[0] for row in rows], [row[1] for row in rows]
    descriptors = Descriptors.of(starts, starts, sizes)
    if len(written) == len(set(written)):
        check_descriptors(descriptors, EVERYWHERE, EVERYWHERE)
    else:
        with pytest.raises(TransportError) as refusal:
            check_descriptors(descriptors, EVERYWHERE, EVERYWHERE)
        assert refusal.value.reason is TransportReason.INVALID_DESCRIPTORS


def test_the_message_names_row_addresses_and_owner() -> None:
    rows = Descriptors.of([0, 0x10], [0, 0x20], [1, 2])
    with pytest.raises(TransportError, match=r"descriptor 1: dst 0x20 \+ 2 bytes .* the peer: \[0x0, 0x21\) in cpu"):
        check_descriptors(rows, EVERYWHERE, RegionTable.of([Region(address=0, nbytes=0x21)]))


def test_a_length_that_would_wrap_is_outside() -> None:
    huge = Descriptors.proven(np.array([8]), np.array([8]), np.array([2**63 - 1]))
    with pytest.raises(TransportError) as refusal:
        check_descriptors(huge, EVERYWHERE, EVERYWHERE)
    assert refusal.value.reason is TransportReason.OUT_OF_RANGE


def test_tables_grow_and_shrink_by_whole_regions() -> None:
    first, second = Region(address=0, nbytes=8), Region(address=8, nbytes=8)
    table = RegionTable.of([first]).with_regions([second])
    assert table.without([first]) == RegionTable.of([second])
    with pytest.raises(TransportError) as refusal:
        table.without([Region(address=0, nbytes=4)])
    assert refusal.value.reason is TransportReason.NOT_REGISTERED
    with pytest.raises(TransportError) as overlap:
        table.with_regions([Region(address=15, nbytes=4)])
    assert overlap.value.reason is TransportReason.INVALID_REGIONS


@given(rows=ROWS, largest=st.integers(1, 13))
def test_split_rows_moves_the_same_bytes(rows: list[tuple[int, int]], largest: int) -> None:
    before = Descriptors.of([row[0] for row in rows], [row[0] + 100 for row in rows], [row[1] for row in rows])
    after = split_rows(before, largest)

    def pairs(descriptors: Descriptors) -> list[tuple[int, int]]:
        columns = (descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.nbytes.tolist())
        return [(s + i, d + i) for s, d, n in zip(*columns, strict=True) for i in range(n)]

    assert pairs(after) == pairs(before)
    assert after.count == sum(-(-nbytes // largest) for _, nbytes in rows)
    assert after.count == 0 or int(after.nbytes.max()) <= largest
