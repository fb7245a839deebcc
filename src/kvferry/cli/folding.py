"""Why a run is as long as it is, in words: the planner's own folding, followed with the names of the axes.

A loop joins the run when on both sides one step is as long as the run is by then. Whatever is left is enumerated: so
many runs in each unit. This file repeats no arithmetic of the planner's but the order in which it folds, and asks
:func:`kvferry.plan.strands.fold` whether the outcome is the same.
"""

from dataclasses import dataclass
from math import prod

from kvferry.cli.costs import Kind
from kvferry.plan.strands import PairLoop, fold


@dataclass(frozen=True, slots=True)
class NamedLoop:
    """A loop of a strand and the axis that it steps along."""

    name: str
    loop: PairLoop


@dataclass(frozen=True, slots=True)
class Folding:
    """What became of the loops of one component in one unit."""

    content: int
    folded: tuple[NamedLoop, ...]
    """In the order in which they lengthened the run."""
    left: tuple[NamedLoop, ...]
    run: int

    @property
    def runs(self) -> int:
        """Runs of one component in one unit."""
        return prod(named.loop.count for named in self.left)

    @property
    def run_words(self) -> str:
        """``576 bytes of content x 64 token x 2 head``."""
        return " x ".join([f"{self.content:,} bytes", *(f"{n.loop.count} {n.name}" for n in self.folded)])

    def reasons(self) -> list[str]:
        """One sentence for each loop that could not be folded, with both strides."""
        return [_reason(named, self.run) for named in self.left]


def folding_of(kind: Kind) -> Folding:
    """Fold the loops of ``kind`` as the planner does, by name."""
    names = [axis.name for axis in kind.dst.first.global_axes]
    shape = kind.strand.shape
    loops = [NamedLoop(name, loop) for name, loop in zip(names, shape.axes, strict=True)]
    loops.append(NamedLoop("token" if kind.dst.first.row_tokens == 1 else "row", shape.row))
    left = [named for named in loops if named.loop.count > 1]
    folded: list[NamedLoop] = []
    run = shape.nbytes
    while (found := next((n for n in left if n.loop.src == run == n.loop.dst), None)) is not None:
        left.remove(found)
        folded.append(found)
        run *= found.loop.count
    planned = fold([named.loop for named in loops], shape.nbytes)
    ordered = sorted(left, key=lambda named: -named.loop.src)
    assert planned == ([n.loop for n in ordered], run), "the planner folds in this order"  # noqa: S101
    return Folding(shape.nbytes, tuple(folded), tuple(ordered), run)


def _reason(named: NamedLoop, run: int) -> str:
    loop = named.loop
    steps = (
        f"{named.name} ({loop.count} steps): {loop.src:,} bytes apart at the producer, {loop.dst:,} at the consumer; "
        f"the run is {run:,}"
    )
    if loop.src == run:
        return f"{steps}, so the producer's follow each other and the consumer's have {_between(loop.dst, run)} between"
    if loop.dst == run:
        return f"{steps}, so the consumer's follow each other and the producer's have {_between(loop.src, run)} between"
    return f"{steps}, so they follow each other on neither side"


def _between(stride: int, run: int) -> str:
    return f"{stride - run:,} other bytes" if stride > run else "another axis"
