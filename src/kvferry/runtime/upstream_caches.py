"""What this rank would show of its caches if it were vLLM's own MooncakeConnector, and what is declared of such peers.

Its pulls describe each registered tensor by a few numbers (:class:`CacheRegion`). A consumer of ours sends them to an
upstream producer; a producer of ours compares those of an upstream consumer with its own. Much is not in them: the
tokens of a block, the type of an element, the order inside a page. That is *declared* by the operator
(:class:`Declared`); what is not declared is taken to be as it is here, and said once for each peer.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from msgspec import structs

from kvferry.errors import ConfigError, ConfigReason, ProtocolReason, RemoteProtocolError
from kvferry.layout import Group
from kvferry.protocol.upstream import GroupRule


@dataclass(frozen=True, slots=True)
class CacheRegion:
    """One tensor, or one head of it, as upstream registers it."""

    layer: str
    index: int
    """Number of the layer, as vLLM reads it from the name."""
    group: int
    base: int
    block_len: int
    """Bytes from one kernel block to the next."""
    kv_block_len: int
    """Bytes of a kernel block that are moved, padding of the page included."""
    groups: tuple[int, ...]
    row_offset: int = -1
    """Of a view into rows that hold several layers; -1: not such a view."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The option ``upstream_peer``: what vLLM's connector at the other end cannot show. ``None``: as it is here."""

    block_size: int | None = None
    kernel_block_size: int | None = None
    cache_dtype: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "kernel_block_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise _undeclarable(name, value, "a whole number above 0")
        for name in ("cache_dtype", "layout"):
            value = getattr(self, name)
            if value is not None and (type(value) is not str or not value):
                raise _undeclarable(name, value, "a text")
        if self.layout is not None and sorted(self.layout) != sorted("LBHNC"):
            raise _undeclarable("layout", self.layout, "one of vLLM's layout names, such as 'LBHNC'")

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """From the option ``upstream_peer``; raises ``ConfigError``."""
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                said = f"option upstream_peer has no {key!r}; the nearest is {near[0]!r}"
                raise ConfigError(ConfigReason.UNKNOWN_OPTION, said)
        return cls(**value)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is left to assume."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is None)


@dataclass(frozen=True, slots=True)
class OwnCaches:
    """This rank's caches in upstream's terms."""

    regions: tuple[CacheRegion, ...]
    block_size: int
    """Tokens of a block of attention groups; where they differ, of the smallest."""
    kernel_block_size: int
    cache_dtype: str
    layout: str
    usual_layout: str | None = None
    """The layout that upstream's connector asks vLLM for; ``None``: it takes any, as for latent rows of one head."""
    one_block_size: bool = True
    """All attention groups have blocks of that size."""
    even_states: bool = False
    """No layer keeps a state that every tensor rank holds whole."""
    whole_blocks: bool = False
    """vLLM clears blocks before their use, but those of a load it does not: whoever loads expects them whole."""
    declared: Declared = Declared()
    unfit: str | None = None
    """Why no upstream peer can be served; ``None``: they can."""

    @property
    def peer_block_size(self) -> int:
        """Of an upstream peer, as declared or assumed."""
        return self.declared.block_size or self.block_size

    @property
    def peer_kernel_block_size(self) -> int:
        """Of an upstream peer, as declared or assumed: with a block size that is declared alone, mine if it fits."""
        declared = self.declared.kernel_block_size
        if declared is not None:
            return declared
        if self.kernel_block_size == self.block_size:
            return self.peer_block_size  # not split here, so not split there
        return self.kernel_block_size

    @property
    def peer_layout(self) -> str:
        """Of an upstream peer: as declared, else what its connector asks for, else as here."""
        return self.declared.layout or self.usual_layout or self.layout

    def check_declared(self) -> None:
        """Refuse a peer whose declaration says that its bytes mean something else than ours."""
        if self.unfit is not None:
            raise _incompatible(self.unfit)
        peer = self.declared
        if peer.cache_dtype is not None and peer.cache_dtype != self.cache_dtype:
            raise _incompatible(f"its cache is declared as {peer.cache_dtype}, this one is {self.cache_dtype}")
        if _inside(self.peer_layout) != _inside(self.layout):
            known = "is declared as" if peer.layout is not None else "is by its own choice"
            raise _incompatible(
                f"its layout {known} {self.peer_layout}, this one is {self.layout}: the order of heads and tokens "
                f"inside a page differs (VLLM_KV_CACHE_LAYOUT={self.peer_layout} here makes them equal)"
            )
        if not self.one_block_size and (self.peer_block_size, self.peer_kernel_block_size) != (
            self.block_size,
            self.kernel_block_size,
        ):
            raise _incompatible(
                f"its blocks are declared as {self.peer_block_size} tokens of kernel blocks of "
                f"{self.peer_kernel_block_size}, and those of this model's cache groups differ, from "
                f"{self.block_size} on"
            )
        if self.peer_block_size % self.peer_kernel_block_size:
            raise _incompatible(
                f"its blocks are declared as {self.peer_block_size} tokens of kernel blocks of "
                f"{self.peer_kernel_block_size}, which do not divide them"
            )

    def assumptions(self) -> str:
        """What is taken to be as it is here, for the one warning about a peer."""
        here = {
            "block_size": self.peer_block_size if self.one_block_size else "of each cache group",
            "kernel_block_size": self.peer_kernel_block_size,
            "cache_dtype": self.cache_dtype,
            "layout": self.peer_layout,
        }
        return ", ".join(f"{name} {here[name]}" for name in self.declared.missing)


def groups_there(groups: tuple[Group, ...], *, block_size: int | None) -> tuple[Group, ...]:
    """These groups as an upstream peer has them, with attention blocks of ``block_size`` tokens.

    Where the blocks of groups differ no one size says what they are: then they are as here.
    """
    sizes = {group.block_tokens for group in groups if group.kind == "attention"}
    if block_size is None or len(sizes) > 1:
        return groups
    return tuple(
        structs.replace(group, block_tokens=block_size) if group.kind == "attention" else group for group in groups
    )


def rules_of(groups: tuple[Group, ...], *, block_size: int | None = None) -> tuple[GroupRule, ...]:
    """How lists of these groups are read, for attention blocks of ``block_size`` tokens."""
    return tuple(
        GroupRule(group.block_tokens, is_state=group.kind == "state", window=group.sliding_window, chunk=group.chunk)
        for group in groups_there(groups, block_size=block_size)
    )


def upstream_tokens(groups: tuple[Group, ...], *, stop: int, prompt_tokens: int) -> int:
    """How many tokens upstream moves of a prompt of which we move ``stop``: it leaves the last one to the decode
    engine only where a state is kept."""
    return stop if any(group.kind == "state" for group in groups) else prompt_tokens


def _undeclarable(name: str, value: object, want: str) -> ConfigError:
    said = f"option upstream_peer: {name} is {value!r}, must be {want}"
    return ConfigError(ConfigReason.INVALID_VALUE, said)


def _inside(layout: str) -> str:
    """The part of a layout's name that the fields do not show: whether heads or tokens come first in a page."""
    return "".join(letter for letter in layout if letter in "HN")


def _incompatible(said: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.INCOMPATIBLE_PEER, f"vLLM's own connector as a peer: {said}")
