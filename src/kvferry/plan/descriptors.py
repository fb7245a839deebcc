"""The end product of planning: which bytes go where, as three columns.

Row ``i`` says: copy ``nbytes[i]`` bytes from ``src[i]`` (an address of the producer's process) to ``dst[i]`` (an
address of the consumer's process). The columns are read-only int64 arrays of one length; a plan of half a million rows
stays three arrays until a transport turns them into what its engine wants.

Two ways to build one: :meth:`Descriptors.of` checks every row; :meth:`Descriptors.proven` takes fresh arrays from a
caller that has proven them (the binder), at a cost that does not depend on the number of rows.

>>> rows = Descriptors.of([4096, 8192], [65536, 69632], [512, 4096])
>>> rows.count, rows.total_bytes
(2, 4608)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvferry.errors import PlanError, PlanReason

Int64Array = npt.NDArray[np.int64]
Int64Like = Sequence[int] | npt.NDArray[np.integer]


def _refuse(message: str) -> PlanError:
    return PlanError(PlanReason.INVALID_REQUEST, message)


def _column(name: str, values: Int64Like) -> Int64Array:
    """A private int64 copy of ``values``; refuses what int64 cannot hold exactly."""
    column = np.array(values if len(values) else np.empty(0, np.int64))
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise _refuse(
            f"descriptors: {name} must be one row of integers below 2**63, "
            f"got {column.ndim} dimensions of {column.dtype}"
        )
    if column.dtype.kind == "u" and column.size and int(column.max()) >= 2**63:
        raise _refuse(f"descriptors: {name} holds {int(column.max())}, the limit is 2**63 - 1")
    return column.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copies to make, one a row. Build with :meth:`of`, :meth:`proven` or :meth:`empty`."""

    src: Int64Array
    """First source byte of each copy, in the producer's process."""
    dst: Int64Array
    """First destination byte of each copy, in the consumer's process."""
    nbytes: Int64Array
    """Length of each copy, positive."""

    def __post_init__(self) -> None:
        for column in (self.src, self.dst, self.nbytes):
            if column.dtype != np.int64 or column.shape != (self.src.size,):
                raise _refuse(
                    f"descriptors: a column is {column.dtype} of shape {column.shape}, "
                    f"expected int64 of shape ({self.src.size},)"
                )
            column.flags.writeable = False

    @classmethod
    def of(cls, src: Int64Like, dst: Int64Like, nbytes: Int64Like) -> Self:
        """Copy and check three columns: equal lengths, addresses >= 0, lengths > 0, ends below 2**63."""
        rows = {"src": _column("src", src), "dst": _column("dst", dst), "nbytes": _column("nbytes", nbytes)}
        sizes = {name: column.size for name, column in rows.items()}
        if len(set(sizes.values())) != 1:
            raise _refuse(f"descriptors: columns differ in length: {sizes}")
        if sizes["src"]:
            _check_rows(rows["src"], rows["dst"], nbytes=rows["nbytes"])
        return cls(**rows)

    @classmethod
    def proven(cls, src: Int64Array, dst: Int64Array, nbytes: Int64Array) -> Self:
        """Take over three fresh int64 arrays whose rows the caller has proven.

        Nothing is copied and no row is looked at; the arrays become read-only, so the caller must own them and keep
        no writable view. Transports check every row against registered memory in any case.
        """
        return cls(src=src, dst=dst, nbytes=nbytes)

    @classmethod
    def empty(cls) -> Self:
        """No copies."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def count(self) -> int:
        """How many copies."""
        return int(self.src.size)

    @property
    def total_bytes(self) -> int:
        """How many bytes all copies move together."""
        return int(self.nbytes.sum())

    def __len__(self) -> int:
        return self.count


def _check_rows(src: Int64Array, dst: Int64Array, *, nbytes: Int64Array) -> None:
    if (shortest := int(nbytes.min())) <= 0:
        row = int(nbytes.argmin())
        raise _refuse(f"descriptors: row {row} has {shortest} bytes, the least is 1")
    for name, column in (("src", src), ("dst", dst)):
        if (lowest := int(column.min())) < 0:
            raise _refuse(f"descriptors: row {int(column.argmin())} has {name} {lowest}, the least is 0")
        # Compared without the sum, which could wrap.
        beyond = column > np.iinfo(np.int64).max - nbytes
        if beyond.any():
            row = int(beyond.argmax())
            raise _refuse(f"descriptors: row {row}: {name} {column[row]} + {nbytes[row]} bytes ends beyond 2**63 - 1")
