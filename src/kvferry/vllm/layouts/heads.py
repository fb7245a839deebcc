"""Which heads of the whole model a tensor-parallel rank holds.

A spec says how many heads *this rank* has, and one head may be one of ``tp`` or the copy of a head that several ranks
share. The whole model's number is needed to tell them apart; it comes from the model's configuration, for a draft
model from its own. vLLM cuts heads evenly, and gives each rank one head when there are fewer heads than ranks: the
first head of a rank is always ``rank * total // tp``.
"""

from dataclasses import dataclass

from kvferry.errors import ConfigError, ConfigReason


@dataclass(frozen=True, slots=True)
class Heads:
    """``[first, first + count)`` of ``total`` heads; equal shards are replicas of each other."""

    first: int
    count: int
    total: int

    @property
    def shards(self) -> int:
        """Different shards that exist."""
        return self.total // self.count

    @property
    def shard(self) -> int:
        """Number of this rank's shard; replicas share it."""
        return self.first // self.count


@dataclass(frozen=True, slots=True)
class TensorRank:
    """Place of a worker among the ranks that split heads and channels."""

    rank: int
    size: int


def heads_of(local: int, total: int | None, *, tp: TensorRank, layer: str) -> Heads:
    """The heads of one rank, from its own number and the whole model's (None where nobody knows).

    >>> heads_of(2, 8, tp=TensorRank(1, 4), layer="attn")
    Heads(first=2, count=2, total=8)
    >>> heads_of(1, 2, tp=TensorRank(3, 4), layer="attn")
    Heads(first=1, count=1, total=2)
    """
    if tp.size == 1:
        return Heads(0, local, local)
    if local > 1:
        # More than one head a rank means that the heads were divided, never copied.
        return Heads(tp.rank * local, local, tp.size * local)
    if total is None:
        raise _refused(layer, f"one KV head on each of {tp.size} ranks, and no total to tell shards from copies")
    if total == tp.size:
        return Heads(tp.rank, 1, total)
    if total > tp.size or tp.size % total:
        raise _refused(layer, f"one KV head on each of {tp.size} ranks cannot come from a total of {total} KV heads")
    return Heads(tp.rank * total // tp.size, 1, total)


def replicated(count: int) -> Heads:
    """Heads that every rank holds in full, as the one latent head of MLA."""
    return Heads(0, count, count)


def _refused(layer: str, what: str) -> ConfigError:
    return ConfigError(ConfigReason.UNSUPPORTED_MODEL, f"layer {layer!r}: {what}")
