"""What vLLM's own MooncakeConnector means by a pull, where its fields do not say it: pairing of ranks, positions.

Its block lists carry no positions. Both its sides list the blocks of a whole prompt and drop from the front what they
have already, or what a window has left behind; so a list is paired *from its end*, and the end is that of the prompt.
Here that becomes a position, from the number of tokens and the tokens of one block, and back. A list that cannot be
the end of such a prompt is refused.

Where a cache keeps a window, the two connectors count a prompt's end differently: ours leaves the last token to the
decode engine, and moves what that token looks at; vLLM's computes it at the prefill engine and once more at the decode
engine, and both have given back what only *it* looked at. Where that is a block of its own, the second computation
would read another block instead (vLLM's own pairs do). Such a prompt is refused, from either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.protocol.messages import NULL_BLOCK
from kvferry.protocol.values import Span, Table


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What decides how the list of one cache group is read."""

    block_tokens: int
    is_state: bool = False
    window: int | None = None
    """Positions that a sliding window keeps."""
    chunk: int | None = None
    """Positions of a chunk, where only those of the current one are kept."""

    @property
    def keeps_all(self) -> bool:
        """Whether every position of a prompt stays."""
        return not self.is_state and self.window is None and self.chunk is None

    def looked_at_from(self, position: int) -> int:
        """The first position that the one at ``position`` looks at."""
        first = 0 if self.window is None else max(0, position - self.window)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def kept_from(self, tokens: int) -> int:
        """The first position that vLLM still has when it has computed so many: it gives back whole blocks.

        >>> GroupRule(16, window=31).kept_from(63), GroupRule(16, window=31).kept_from(62)
        (32, 16)
        """
        return self.looked_at_from(tokens) // self.block_tokens * self.block_tokens


def paired_ranks(rank: int, size: int, *, others: int) -> tuple[int, ...]:
    """Tensor ranks of the other side, of ``others`` ranks, that rank ``rank`` of ``size`` exchanges pulls with.

    >>> paired_ranks(1, 2, others=4), paired_ranks(3, 4, others=2), paired_ranks(1, 2, others=2)
    ((2, 3), (1,), (1,))
    """
    if size % others and others % size:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"{size} tensor parallel ranks here, {others} at the peer: vLLM's connector needs one to divide the other",
        )
    if size >= others:
        return (rank // (size // others),)
    each = others // size
    return tuple(range(rank * each, (rank + 1) * each))


def paired_stages(stage: int, stages: int, *, others: int) -> tuple[int, ...]:
    """Pipeline stages of a producer that a consumer stage pulls from: its own, or all where the sizes differ."""
    return (stage,) if stages == others else tuple(range(others))


def pulls_awaited(consumer_ranks: int, *, consumer_stages: int, producer_stages: int) -> int:
    """How many pulls a producer rank serves before a transfer is done."""
    return consumer_ranks * (consumer_stages if 1 < consumer_stages != producer_stages else 1)


def place_lists(lists: Sequence[Sequence[int]], rules: Sequence[GroupRule], tokens: int) -> tuple[Table, ...]:
    """The block lists of a pull as tables with positions; ``tokens``: up to where the consumer's cache will reach.

    >>> place_lists([[7, 8]], [GroupRule(16)], 50)
    (Table(first_token=32, blocks=(7, 8)),)
    """
    if len(lists) != len(rules):
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER, f"the pull lists {len(lists)} cache groups, this engine has {len(rules)}"
        )
    return tuple(_placed(blocks, rule, tokens) for blocks, rule in zip(lists, rules, strict=True))


def span_of(tables: Sequence[Table], rules: Sequence[GroupRule], published: Span) -> Span:
    """The positions that such tables ask for: what is missing at the consumer, as far as it was published.

    A cache without windows lists everything that is missing; a window's list only says what it keeps of that.
    """
    starts = {
        min(table.first_token or 0, published.stop) for table, rule in zip(tables, rules, strict=True) if rule.keeps_all
    }
    if len(starts) > 1:
        raise RemoteProtocolError(
            ProtocolReason.MALFORMED, f"the cache groups of one request begin at different positions: {sorted(starts)}"
        )
    windows = [
        table.first_token or 0
        for table, rule in zip(tables, rules, strict=True)
        if not (rule.is_state or rule.keeps_all)
    ]
    start = min(starts or windows, default=published.start)
    return Span(min(start, published.stop), published.stop)


def check_kept(rules: Sequence[GroupRule], wanted: Span, *, tokens: int, side: str) -> None:
    """Raise where vLLM's connector at ``side`` has given back something that the last token of a prompt looks at.

    ``wanted``: positions that are needed of it, up to that token; ``tokens``: how many it has computed, or will say
    that it has when they came.
    """
    for rule in rules:
        first, kept = max(wanted.start, rule.looked_at_from(wanted.stop)), rule.kept_from(tokens)
        if first < wanted.stop and kept > first:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"the last token of this prompt looks at position {first}, and vLLM's own connector at the {side} side "
                f"keeps a window from position {kept} on",
            )


def list_blocks(tables: Sequence[Table], rules: Sequence[GroupRule], *, tokens: int) -> tuple[tuple[int, ...], ...]:
    """The lists of a pull for a producer that has computed ``tokens`` tokens, paired by it from their ends.

    A producer's last block that holds nothing we want is paired with the null block, whose content means nothing.
    """
    return tuple(_listed(table, rule, tokens) for table, rule in zip(tables, rules, strict=True))


def _placed(blocks: Sequence[int], rule: GroupRule, tokens: int) -> Table:
    if rule.is_state:
        held = tuple(block for block in blocks if block != NULL_BLOCK)
        if len(held) > 1:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"{len(held)} blocks for one state: which of them is the prompt's last cannot be told",
            )
        return Table(None, held)
    entries = -(-tokens // rule.block_tokens)
    if len(blocks) > entries:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"{len(blocks)} blocks of {rule.block_tokens} tokens for a prompt of {tokens}: the peer's blocks are of "
            "another size (option upstream_peer)",
        )
    first = (entries - len(blocks)) * rule.block_tokens
    return Table(first, tuple(None if block == NULL_BLOCK else block for block in blocks))


def _listed(table: Table, rule: GroupRule, tokens: int) -> tuple[int, ...]:
    if rule.is_state:
        return tuple(block for block in table.blocks[-1:] if block is not None)
    blocks = list(table.blocks)
    if not blocks:
        return ()
    first = table.first_token or 0
    missing = -(-tokens // rule.block_tokens) - first // rule.block_tokens - len(blocks)
    blocks = blocks[:missing] if missing < 0 else [*blocks, *[None] * missing]
    while blocks and blocks[0] is None:
        del blocks[0]
    if rule.window is not None:
        blocks = blocks[-(-(-rule.window // rule.block_tokens) + 1) :]
    return tuple(NULL_BLOCK if block is None else block for block in blocks)
