"""The records on the wire, as frozen msgspec structs.

Two layers share one map. The outer one is what vLLM's own MooncakeConnector (0.32) reads and writes: a *pull* from a
consumer rank and *replies* from a producer rank, each a single msgpack map in a single frame. Everything that is
ours lies under the one top-level key ``kvferry``, which upstream ignores; block lists stay where upstream has them,
and their positions are a parallel map under ``kvferry``. Messages that upstream has no word for (hello, layouts,
abort) have their body under the same key and go only to peers that are proven to be kvferry.

Rules of growth: fields are added with defaults, never renamed or retyped within a major version; features name what
a peer can do. Bytes are made and checked in ``codec``.

History: 1.0 first form.
"""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

VERSION: Final = (1, 0)
"""Ours. Another minor version is spoken to, another major one is refused by name."""

FEATURES: Final = ("abort", "layouts", "release", "verify", "verify-sums")

NULL_BLOCK: Final = 0
"""What an upstream block list holds where the engine keeps no block."""

UNPAIRED_RANK: Final = -1
"""The rank of a hello: no producer is paired with it, so upstream answers at once and does nothing."""

MAX_NAME: Final = 512
"""Characters of the longest id that a message may hold."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Given = Annotated[str, Meta(min_length=1, max_length=65_536)]
"""A name that a client of an upstream engine may have chosen. One that is too long fails its request, not the pull."""

Text = Annotated[str, Meta(max_length=4096)]
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=65_536)]
Blocks = Annotated[tuple[Whole, ...], Meta(max_length=1 << 20)]
GroupBlocks = Annotated[tuple[Blocks, ...], Meta(max_length=256)]
Regions = Annotated[tuple[int, ...], Meta(max_length=65_536)]
Names = Annotated[tuple[Name, ...], Meta(max_length=65_536)]
Version = tuple[Whole, Whole]


class Status(IntEnum):
    """Of a reply. The last is only for a peer that sent a ``layout_id``."""

    FINISH = 0
    CONTINUE = 1
    ERROR = 2
    LAYOUT_MISS = 3


# ------------------------------------------------------------------------------------- under the key kvferry


class Side(Struct, frozen=True, omit_defaults=True):
    """One engine in one life of it, as one of its ranks presents it."""

    engine_id: Name
    epoch: Name
    index: Annotated[int, Meta(ge=0, le=65_535)]
    """The rank in question: of the sender, or of the one addressed."""

    fingerprints: Annotated[tuple[Name, ...], Meta(max_length=65_536)] = ()
    """Of the placements of all ranks, in order of rank."""

    model: Annotated[str, Meta(max_length=512)] = ""
    """What must be equal at both ends for a cache to mean the same."""


class Positions(Struct, frozen=True, omit_defaults=True):
    """Of the block lists of one request: what upstream's record has no room for."""

    start: Whole
    stop: Whole
    first_tokens: Annotated[tuple[Whole | None, ...], Meta(max_length=256)]
    """Per group, the position of the first token of the first entry."""

    nulls: Annotated[tuple[Blocks, ...], Meta(max_length=256)] = ()
    """Per group, the entries where the engine keeps no block; empty when no group has one."""

    prompt: Annotated[str, Meta(max_length=128)] | None = None
    """Digest of the prompt's tokens up to ``stop``; absent where nothing is wanted."""


class VerifyAsk(Struct, frozen=True, omit_defaults=True):
    """Send digests of what was written, of one page in ``every``, chosen by ``seed``."""

    every: Size
    seed: Whole
    sums: bool = False
    """Of the sums of rows instead of their bytes; only for a producer with the feature ``verify-sums``."""


class PullExtension(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="pull"):
    """What a kvferry consumer adds to a pull."""

    version: Version
    pull: Whole
    """Number of the pull, unique in the life of the sending rank; replies repeat it."""

    consumer: Side
    producer: Side
    """The addressed side, as the sender knows it: another epoch or fingerprint there, and the pull is refused."""

    transport: Name
    address: Name
    """Where the consumer receives, in the transport's own form."""

    bases: Annotated[tuple[Whole, ...], Meta(max_length=65_536)]
    """The binding: absolute address of each storage of the consumer's placement."""

    requests: Annotated[dict[Name, Positions], Meta(max_length=4096)]
    placements: Annotated[dict[Name, bytes], Meta(max_length=65_536)] = {}
    """By fingerprint, inlined when the producer said that it lacks them."""

    features: Names = ()
    verify: VerifyAsk | None = None
    """Only for a producer with the feature ``verify``."""


class Hello(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="hello"):
    """Who are you? Sent in the shape of a pull of an unpaired rank, so that upstream answers it too."""

    version: Version
    features: Names = ()


class LayoutAsk(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="layouts"):
    """Ask for placements by fingerprint."""

    version: Version
    ask: Whole
    fingerprints: Names


class AbortNotice(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="abort"):
    """The sender wants nothing more of these transfers. Open pulls for them are answered once quiet."""

    version: Version
    consumer: Side
    transfers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]
    expected: Size = 1
    """How many ranks of the sender's side this producer rank would hear from."""

    failed: bool = False


class ReleaseNotice(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="release"):
    """From the bootstrap service to the ranks of its engine: the router says that nobody will pull these."""

    version: Version
    transfers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]


class QuietAsk(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="quiet"):
    """Give up what you have of my pulls, serve none of them that comes late, and say when none of them moves a byte.

    For a consumer that lost a connection and cannot stop a writer otherwise: the word of a live writer is then the
    only proof, short of its end.
    """

    version: Version
    ask: Whole
    consumer: Side
    below: Whole
    """The sender's pulls with a lower number are meant."""


class Failed(Struct, frozen=True, omit_defaults=True):
    """A request of a pull that is not served."""

    request: Name
    reason: Name
    quiet: bool = False
    """No byte for it will be written any more; until that is said its blocks stay held."""

    detail: Text = ""


class PartDone(Struct, frozen=True, omit_defaults=True):
    """Positions that have arrived, completely, for one request of the pull from this producer rank."""

    request: Name
    start: Whole
    stop: Whole
    epoch: Whole = 0
    """Parts of an earlier epoch are void: the prompt was computed again."""

    groups: Annotated[tuple[Whole, ...], Meta(max_length=256)] | None = None
    """``None``: all groups."""


class ReplyExtension(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="reply"):
    """What a kvferry producer adds to a reply."""

    version: Version
    producer: Side
    pull: Whole | None = None
    """The pull's own number; absent where the pull could not be read that far."""

    parts: Annotated[tuple[PartDone, ...], Meta(max_length=65_536)] = ()
    failed: Annotated[tuple[Failed, ...], Meta(max_length=4096)] = ()
    reason: Name | None = None
    """Of an ERROR, which refuses the whole pull: nothing was or will be written."""

    missing: Names = ()
    """Fingerprints of the placements that the producer lacks (reason ``layout-miss``)."""

    digests: Annotated[dict[Name, Annotated[bytes, Meta(max_length=4 << 20)]], Meta(max_length=4096)] = {}
    """Of the pages of requests that are named ok here, where the pull asked for them; 16 bytes each, in the order that
    both ends work out alike."""


class HelloAnswer(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="hello"):
    """We are a kvferry producer rank."""

    version: Version
    producer: Side
    features: Names = ()
    transport: Text = ""
    transport_address: Text = ""
    """Of the engine that the rank writes with."""


class QuietAnswer(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="quiet"):
    """Whether no byte moves any more, or ever will, for the pulls that were meant."""

    version: Version
    ask: Whole
    quiet: bool


class LayoutAnswer(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="layouts"):
    """The placements asked for; one that is not known here is left out."""

    version: Version
    ask: Whole
    placements: Annotated[dict[Name, bytes], Meta(max_length=65_536)]


# ------------------------------------------------------------------------------------------ upstream's shapes


class Pull(Struct, frozen=True, omit_defaults=True):
    """A consumer rank asks a producer rank to write. All fields but the last are upstream's, in its order.

    No more than fifteen: then msgspec writes the same short map header as for upstream's own record.
    """

    remote_hostname: Text
    remote_port: Annotated[int, Meta(ge=0, le=65_535)]
    remote_tp_size: Size
    remote_tp_rank: Annotated[int, Meta(ge=-1, le=65_535)]
    req_blocks: Annotated[dict[Given, tuple[Given, GroupBlocks]], Meta(max_length=4096)]
    """By the consumer's request id: transfer id and, per group, blocks."""

    kv_caches_base_addr: Regions
    block_lens: Regions
    kv_block_lens: Regions
    registered_layer_names: Annotated[tuple[Text, ...], Meta(max_length=65_536)] = ()
    registered_layer_indices: Regions = ()
    registered_group_indices: Regions = ()
    registered_shared_group_ids: Annotated[tuple[Regions, ...], Meta(max_length=65_536)] = ()
    registered_row_offsets: Regions = ()
    remote_pp_size: Size = 1
    kvferry: PullExtension | Hello | None = None


class Note(Struct, frozen=True, omit_defaults=True):
    """A message that upstream has no word for."""

    kvferry: LayoutAsk | AbortNotice | ReleaseNotice | QuietAsk


class Reply(Struct, frozen=True, omit_defaults=True):
    """A producer rank answers. Fields up to ``err_msg`` are upstream's, in its order."""

    status: Status
    ok_reqs: Annotated[tuple[Name, ...], Meta(max_length=4096)] | None = None
    err_reqs: Annotated[tuple[Name, ...], Meta(max_length=4096)] | None = None
    err_msg: Text | None = None
    kvferry: ReplyExtension | HelloAnswer | LayoutAnswer | QuietAnswer | None = None


Inbound = Pull | Note
"""What a producer's listener may receive."""
