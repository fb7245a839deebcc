"""The columns that plans end in."""

import numpy as np
import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.plan.descriptors import Descriptors


def test_columns_are_private_and_read_only() -> None:
    src = np.array([1, 2])
    rows = Descriptors.of(src, [10, 20], [3, 4])
    src[0] = 99
    assert rows.src.tolist() == [1, 2]
    assert (rows.count, len(rows), rows.total_bytes) == (2, 2, 7)
    for column in (rows.src, rows.dst, rows.nbytes):
        assert column.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 5


def test_empty() -> None:
    for rows in (Descriptors.empty(), Descriptors.of([], [], [])):
        assert (rows.count, rows.total_bytes) == (0, 0)


def test_proven_takes_the_arrays_themselves() -> None:
    src, dst, nbytes = np.array([1]), np.array([2]), np.array([3])
    rows = Descriptors.proven(src, dst, nbytes)
    assert rows.src is src
    assert not src.flags.writeable
    with pytest.raises(PlanError, match="expected int64"):
        Descriptors.proven(np.array([1], np.int32), dst, nbytes)
    with pytest.raises(PlanError, match="expected int64"):
        Descriptors.proven(np.array([1, 2]), np.array([2]), np.array([3]))


@pytest.mark.parametrize(
    ("src", "dst", "nbytes", "said"),
    [
        ([1], [1, 2], [1], "differ in length"),
        ([1], [1], [0], "row 0 has 0 bytes"),
        ([1, 1], [1, 5], [1, -2], "row 1 has -2 bytes"),
        ([-1], [1], [1], "src -1"),
        ([1, 1], [1, -7], [1, 1], "row 1 has dst -7"),
        ([2**63 - 1], [1], [1], "ends beyond"),
        ([1], [2**63 - 5], [5], "ends beyond"),
        ([2**63], [1], [1], "src holds"),
        ([2**70], [1], [1], "src"),
        ([1.5], [1], [1], "row of integers"),
        (np.ones((1, 1), np.int64), [1], [1], "2 dimensions"),
    ],
)
def test_refusals_name_the_row_and_the_value(src: object, dst: object, nbytes: object, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refusal:
        Descriptors.of(src, dst, nbytes)  # type: ignore[arg-type]
    assert refusal.value.reason is PlanReason.INVALID_REQUEST


def test_the_last_byte_of_the_address_space_is_usable() -> None:
    assert Descriptors.of([2**63 - 2], [0], [1]).total_bytes == 1
