"""What would make a pair cheaper: for each class the differences between the two layouts that cost descriptors.

A class is as cheap as layouts can make it when every component of a block is one run; nothing is advised then.
"""

from collections.abc import Callable, Iterable, Sequence

from kvferry.cli.costs import ClassCost, Kind, PairCost, name_pairs, piece_tokens
from kvferry.cli.folding import Folding, folding_of
from kvferry.layout import Component
from kvferry.plan.pair import ClassKey

SMALL_RUN = 65_536
"""Below this many bytes a run costs a network engine about as much as one of this size."""


def cheaper(costs: Sequence[PairCost]) -> list[str]:
    """One sentence for each change to a layout that would save descriptors."""
    advice: dict[str, None] = {}
    for cost in costs:
        for one in cost.classes:
            advice.update(dict.fromkeys(_advice(cost, one)))
    advice.update(dict.fromkeys(_padding(costs)))
    parts = [part for cost in costs for part in (cost.attention, cost.state) if part is not None]
    smallest = min((part.smallest for part in parts), default=SMALL_RUN)
    if advice and smallest < SMALL_RUN:
        advice[
            f"runs under {SMALL_RUN:,} bytes cost about as much as one of that size: the smallest has {smallest:,}"
        ] = None
    return list(advice) or [
        "nothing in the layouts: every component of a block is one run already; blocks with consecutive ids on both "
        "sides join further"
    ]


def _advice(cost: PairCost, one: ClassCost) -> Iterable[str]:
    """What is said of a class depends on how far its components join those of others."""
    if _joined(cost, one.plan.key.kind, lambda key: min(key.src.entry_tokens, key.dst.entry_tokens)):
        yield from _larger_blocks(one)
        return
    folded = _joined(cost, one.plan.key.kind, lambda key: key.unit_tokens)
    if not folded:
        for kind in one.kinds:
            yield from _fold_advice(one.name, kind, folding_of(kind))
    if one.plan.key.kind == "attention":
        yield from _block_advice(one, folded=folded or not folding_of(one.kinds[0]).left)


def _joined(cost: PairCost, kind: str, stretch: Callable[[ClassKey], int]) -> bool:
    """Whether all that moves of a layer in a stretch of so many tokens is one run, components joined.

    Keys and values of each head side by side are runs of their own when looked at alone, and one page when looked at
    together.
    """
    part = cost.state if kind == "state" else cost.attention
    if part is None:
        return False
    least: dict[str, float] = {}
    for one in cost.classes:
        if one.plan.key.kind != kind:
            continue
        stretches = part.tokens / stretch(one.plan.key) if part.tokens else 1
        for layer in (c.layer for alike in one.kinds for c in alike.dst.members):
            least[layer] = max(least.get(layer, 0), stretches)
    return part.runs <= sum(least.values()) + 1e-9


def _larger_blocks(one: ClassCost) -> Iterable[str]:
    sizes = one.plan.key.src.block_tokens, one.plan.key.dst.block_tokens
    if one.plan.key.kind == "attention" and sizes[0] != sizes[1]:
        yield (
            f"{one.name}: blocks of {max(sizes):,} tokens on both sides, now {sizes[0]:,} at the producer and "
            f"{sizes[1]:,} at the consumer"
        )


def _padding(costs: Sequence[PairCost]) -> Iterable[str]:
    """Where runs are kept apart by nothing but padding of blocks that the request owns."""
    told: dict[str, list[PairCost]] = {}
    for cost in costs:
        for part, words in ((cost.attention, "per 1,000 tokens"), (cost.state, "of state for each request")):
            if part is not None and part.bridged.runs < part.runs:
                scale = 1000 / part.tokens if part.tokens else 1
                numbers = (part.runs, part.bridged.runs, part.bridged.nbytes - part.nbytes)
                before, after, more = (f"{number * scale:,.1f}".removesuffix(".0") for number in numbers)
                told.setdefault(f"{after} descriptors {words} instead of {before}, for {more} bytes more", []).append(
                    cost
                )
    for words, pairs in told.items():
        yield (
            f"{name_pairs(pairs)}: padding that may move (the library's allow_padding; kvferry plan never moves any) "
            f"joins runs of one block: {words}"
        )


def _block_advice(one: ClassCost, *, folded: bool) -> Iterable[str]:
    """Of units: ``folded`` where what moves of one is a single run."""
    name, key, first = one.name, one.plan.key, one.kinds[0]
    pieces = piece_tokens(key.src, first.src.first), piece_tokens(key.dst, first.dst.first)
    blocks = key.src.entry_tokens, key.dst.entry_tokens
    shares = [(s.size, s.interleave) if s else (1, 1) for s in (key.src.share, key.dst.share)]
    if one.cost.runs_of(max(blocks)) <= len(one.plan.strands) + 1e-9:
        return
    pages = _page_tokens(first.src.first), _page_tokens(first.dst.first)
    if pages[0] != pages[1] and (pieces[0] != pieces[1] or not folded):
        yield (
            f"{name}: equal kernel blocks, now {pages[0]:,} tokens at the producer and {pages[1]:,} at the consumer "
            f"(a unit of {key.unit_tokens:,})"
        )
    sizes = key.src.block_tokens, key.dst.block_tokens
    if sizes[0] != sizes[1]:
        yield f"{name}: equal block sizes, now {sizes[0]:,} tokens at the producer and {sizes[1]:,} at the consumer"
    if shares[0] != shares[1]:
        yield f"{name}: equal context-parallel size and interleave on both sides, now {shares[0]} and {shares[1]}"
    if pieces[0] == pieces[1] and blocks[0] == blocks[1] and shares[0] == shares[1] and folded:
        yield (
            f"{name}: kernel blocks as large as the block, or pages that follow each other without a gap on both "
            "sides, so that the units of a block join"
        )


def _page_tokens(component: Component) -> int:
    token = component.token_axis
    assert token is not None, "only attention has pages"  # noqa: S101
    return token.count * component.row_tokens


def _differ_in_page_size_alone(kind: Kind) -> bool:
    if kind.key.kind == "state" or not _same_order(kind):
        return False
    return _page_tokens(kind.src.first) != _page_tokens(kind.dst.first)


def _same_order(kind: Kind) -> bool:
    """Whether both sides nest their axes alike, outermost first."""
    orders = [
        [axis.name for axis in sorted(side.first.axes, key=lambda a: -a.stride) if axis.count > 1]
        for side in (kind.src, kind.dst)
    ]
    return orders[0] == orders[1]


def _fold_advice(name: str, kind: Kind, folding: Folding) -> Iterable[str]:
    if not folding.left:
        return
    split = [
        mine.name
        for mine, theirs, met in zip(kind.src.first.global_axes, kind.dst.first.global_axes, kind.box, strict=True)
        if met.size < max(mine.count, theirs.count)
    ]
    where = "state" if kind.key.kind == "state" else "page"
    spread = [
        f"the {side}'s {n.name} steps ({step:,} bytes) are further apart than its blocks ({stride:,})"
        for n in folding.left
        for side, step, stride in (
            ("producer", n.loop.src, kind.key.src.block_stride),
            ("consumer", n.loop.dst, kind.key.dst.block_stride),
        )
        if step >= stride
    ]
    if spread:
        yield f"{name}: every block in one piece of memory: {'; '.join(spread)}"
    elif not split and _differ_in_page_size_alone(kind):
        return  # said once, of the whole class
    elif len(split) == 1:
        axis = split[0]
        total = folding.run * folding.runs
        yield (
            f"{name}: {axis}-major {where}s on both sides ({axis} the outermost axis): the part of this pair would be "
            f"one run of {total:,} bytes in a unit instead of {folding.runs:,} runs of {folding.run:,}"
        )
    elif split:
        yield f"{name}: {' and '.join(split)} sharded alike on both sides, or outermost inside a {where}"
    else:
        order = "no gaps" if _same_order(kind) else "the same order of axes"
        yield f"{name}: {order} inside a {where} on both sides, so that it is one run"
