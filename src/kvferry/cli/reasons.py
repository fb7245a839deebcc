"""Why two sides are planned as they are, in words: the text of ``kvferry explain``.

Five questions, in the order in which the planner answers them: what do the ranks have in common, which copy serves
whom, what is the unit, what is the run, and how many descriptors come of it. Then what would make it fewer. Pairs that
are planned alike are told once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cli.advice import cheaper
from kvferry.cli.costs import ClassCost, Kind, PairCost, name_pairs, piece_tokens
from kvferry.cli.folding import folding_of
from kvferry.cli.layers import alike, part_of
from kvferry.cli.output import counted
from kvferry.layout import Component, ContextParallel
from kvferry.plan import Plan
from kvferry.plan.boxes import Box, box_of
from kvferry.plan.pair import SideOfClass

Lines = list[str]


def explain(plan: Plan, costs: Sequence[PairCost]) -> Lines:
    """The whole text, line by line."""
    sides = f"{counted(len(plan.producers), 'producer')} to {counted(len(plan.consumers), 'consumer')}"
    out = [sides, "", "What the ranks have in common (every axis but token is intersected)"]
    out += _indent(_common(costs)) or ["  nothing: no consumer component has a counterpart"]
    copies = _copies(plan)
    out += [
        "",
        "Which producer serves",
        *_indent(copies or ["no two producers hold the same: each serves what it has"]),
    ]
    told: dict[tuple[str, ...], list[PairCost]] = {}
    for cost in costs:
        told.setdefault(tuple(_how(cost)), []).append(cost)
    for body, pairs in told.items():
        out += ["", f"How {name_pairs(pairs)} {'is' if len(pairs) == 1 else 'are'} planned", *_indent(body)]
    out += ["", "What would make it cheaper", *_indent(cheaper(costs))]
    return out


def _indent(lines: Iterable[str]) -> Lines:
    return [f"  {line}" for line in lines]


# ------------------------------------------------------------------------------------- what there is in common


def _common(costs: Sequence[PairCost]) -> Lines:
    told: dict[tuple[str, ...], list[PairCost]] = {}
    for cost in costs:
        kinds = (kind for one in cost.classes for kind in one.kinds)
        told.setdefault(tuple(f"{_named(k)}: {_intersection(k)}{_dealt(k)}" for k in kinds), []).append(cost)
    return [line for body, pairs in told.items() for line in (f"{name_pairs(pairs)}:", *_indent(body))]


def _named(kind: Kind) -> str:
    return f"{kind.dst.layers} {kind.dst.first.component}"


def _intersection(kind: Kind) -> str:
    words = []
    for mine, theirs, met in zip(kind.src.first.global_axes, kind.dst.first.global_axes, kind.box, strict=True):
        common = part_of(mine.name, met.start, met.stop, mine.total)
        if (mine.start, mine.stop) == (theirs.start, theirs.stop):
            words.append(f"{common}, the same part on both sides")
        else:
            held = [f"{a.start}..{a.stop - 1}" for a in (mine, theirs)]
            words.append(f"{common} (the producer holds {held[0]}, the consumer {held[1]})")
    return "; ".join(words) or "no axis but token: every rank that has the layer holds all of it"


def _dealt(kind: Kind) -> str:
    shares = (kind.key.src.share, kind.key.dst.share)
    if shares == (None, None):
        return ""
    return f"; positions: {' met with '.join(_share(s) for s in shares)}"


def _share(share: ContextParallel | None) -> str:
    return "all" if share is None else f"rank {share.rank} of {share.size} ({share.interleave} at a time)"


# ------------------------------------------------------------------------------------------------------ replicas


@dataclass(frozen=True, slots=True)
class _Held:
    """One box of one component kind, and who holds it."""

    box: Box
    share: ContextParallel | None
    component: str


def _copies(plan: Plan) -> Lines:
    """One line for each set of replicas: its members, and who reads from which."""
    holders: dict[tuple[str, str], dict[_Held, list[int]]] = {}
    first: dict[tuple[str, str], Component] = {}
    for worker, placement in enumerate(plan.producers):
        for component in placement.components:
            held = _Held(box_of(component), placement.groups[component.group].share, component.component)
            holders.setdefault(component.key, {}).setdefault(held, []).append(worker)
            first.setdefault(component.key, component)
    sets: dict[tuple[int, ...], list[Component]] = {}
    for key, by_box in holders.items():
        for members in by_box.values():
            if len(members) > 1:
                sets.setdefault(tuple(members), []).append(first[key])
    return [_copy_line(plan, members, components) for members, components in sets.items()]


def _copy_line(plan: Plan, members: tuple[int, ...], components: Sequence[Component]) -> str:
    keys = {c.key for c in components}
    readers = {
        consumer: producer
        for (producer, consumer), moves in sorted(plan.assignment.moves.items())
        if producer in members and any(plan.producers[producer].components[m.src].key in keys for m in moves)
    }
    kinds = ", ".join(f"{same.layers} {same.first.component}" for same in alike(components))
    who = ", ".join(f"consumer {c} from producer {p}" for c, p in sorted(readers.items())) or "nobody needs them"
    return (
        f"producers {', '.join(map(str, members))} hold equal copies of {kinds}; the k-th consumer that needs them "
        f"reads copy k mod {len(members)}, for all layers alike: {who}"
    )


# ------------------------------------------------------------------------------------------- units, runs, descriptors


def _how(cost: PairCost) -> Lines:
    lines: Lines = []
    for one in cost.classes:
        lines.append(f"{one.name}:")
        lines += _indent([_unit(one), *_runs(one), _descriptors(one)])
    for part, words in (
        (cost.attention, "per 1,000 tokens in scattered blocks"),
        (cost.state, "of state for each request"),
    ):
        if part is not None:
            runs = part.runs_of(1000) if part.tokens else part.runs
            lines.append(f"in all {_round(runs)} descriptors {words}, the smallest of {part.smallest:,} bytes")
    return lines


def _unit(one: ClassCost) -> str:
    key = one.plan.key
    if key.kind == "state":
        return "unit: the whole state, one block on each side; no token axis, so positions only choose the block"
    sides = (("producer", key.src, one.kinds[0].src.first), ("consumer", key.dst, one.kinds[0].dst.first))
    whole = all(key.unit_tokens == side.block_tokens and side.share is None for _, side, _ in sides)
    if whole:
        return f"unit: {key.unit_tokens:,} tokens, the whole block of both sides; it cannot be larger than a block"
    limits = [_limit(name, side, component) for name, side, component in sides]
    limits += [
        f"the {name} deals positions out {side.share.interleave:,} at a time"
        for name, side, _ in sides
        if side.share is not None
    ]
    return (
        f"unit: {key.unit_tokens:,} tokens, the largest that divides what is uniform on both sides: {'; '.join(limits)}"
    )


def _limit(name: str, side: SideOfClass, component: Component) -> str:
    tokens = piece_tokens(side, component)
    if component.pages == 1:
        return f"the {name}'s block has {tokens:,} tokens"
    if tokens == side.block_tokens:
        return f"the {name}'s {component.pages} kernel blocks follow each other row by row, {tokens:,} tokens in all"
    return (
        f"the {name}'s kernel block has {tokens:,} tokens (its {component.pages} kernel blocks lie "
        f"{component.page_stride:,} bytes apart and do not continue each other row by row)"
    )


def _runs(one: ClassCost) -> Lines:
    told: dict[str, list[Kind]] = {}
    for kind in one.kinds:
        folding = folding_of(kind)
        words = f"run: {folding.run:,} bytes = {folding.run_words}"
        if folding.runs > 1:
            words += f"; {folding.runs:,} runs in a unit, for what follows does not fold\n  "
            words += "\n  ".join(folding.reasons())
        told.setdefault(words, []).append(kind)
    lines = []
    for words, kinds in told.items():
        who = f"{', '.join(dict.fromkeys(k.dst.first.component for k in kinds))} " if len(told) > 1 else ""
        lines += f"{who}{words}".split("\n")
    return lines


def _descriptors(one: ClassCost) -> str:
    key, full = one.plan.key, one.plan.full.count
    alone = sum(folding_of(kind).runs * len(kind.dst.members) for kind in one.kinds)
    made = f"{counted(alone, 'run')} of {counted(len(one.plan.strands), 'component')} in a unit"
    if full < alone:
        made += f", joined to {full:,} where components touch on both sides"
    if key.kind == "state":
        return f"descriptors: {made}, once a request"
    units = max(1, key.dst.block_tokens // key.unit_tokens)
    runs = one.runs_per_block
    joined = f", joined to {_round(runs)} where units touch on both sides" if runs < full * units - 1e-9 else ""
    return f"descriptors: {made}; {counted(units, 'unit')} in a consumer's block: {full * units:,}{joined}"


def _round(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")
