"""Whether a cell (:mod:`kvferry.testing.cells`) was what it says: each check yields what was not.

Nothing is taken from the settings of the engines. Logical blocks are those of the scheduler, kernel blocks are counted
in the tensors of every rank, steps are those that the scheduler made, what a prefix cache found is what was not
computed and did not move, and the transport is the one that moved it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from kvferry.testing.cell_engines import CHUNK_TOKENS, KERNEL_BLOCK, block_sizes
from kvferry.testing.cells import Cache, Cell, Chunks, Peer, Split
from kvferry.testing.comparison import Prompt
from kvferry.testing.engines import Engine
from kvferry.testing.model_recipes import MODELS
from kvferry.testing.pair import Served
from kvferry.testing.transfer_report import Transfer

_STATE: Final = "MambaSpec"


def not_built_as_said(cell: Cell, engines: Sequence[Engine]) -> Iterator[str]:
    """Ranks, logical and kernel blocks of all engines of the cell."""
    for engine in engines:
        name = engine.spec.name
        decodes = name == "decode" or (name == "upstream" and cell.peer is Peer.DECODE)
        block, tp = block_sizes(cell)[decodes], cell.tp.sizes[decodes]
        facts, ranks = engine.inspect(), engine.inspect_caches()
        attention = [group for group in facts.groups if group.kind != _STATE]
        if (found := {group.block_tokens for group in attention}) != {block}:
            yield f"{name}: blocks of {found} tokens instead of {block}"
        if len(ranks) != tp:
            yield f"{name}: {len(ranks)} ranks instead of {tp}"
        want = facts.num_blocks * (block // KERNEL_BLOCK if cell.split is Split.ON else 1)
        for rank, tensors in enumerate(ranks):
            rows = {tensors[layer].shape[0] for group in attention for layer in group.layers}
            if rows != {want}:
                yield f"{name}, rank {rank}: {rows} kernel blocks for {facts.num_blocks} blocks of {block}"


def not_computed_as_said(cell: Cell, prompt: Prompt, served: Served) -> Iterator[str]:
    """Steps at the prefill engine; at the decode engine no more than the last token of the prompt."""
    steps, tokens = served.prefill.prompt_steps, len(prompt.tokens)
    computed = tokens - served.prefill.cached_tokens
    if sum(steps) not in (computed, computed - 1):  # beside a state the last one may be left to the decode engine
        yield f"{steps} tokens were computed at prefill instead of {computed}"
    at_once = len(steps) == 1
    in_chunks = max(steps, default=0) <= CHUNK_TOKENS and (len(steps) > 1 or computed <= CHUNK_TOKENS)
    if not (in_chunks if cell.chunks is Chunks.ON else at_once):
        yield f"computed in steps of {steps} tokens"
    if sum(served.decode.prompt_steps) > 1 or served.decode.cached_tokens < tokens - 1:
        yield f"the decode engine computed {served.decode.prompt_steps} tokens of the prompt itself"


def not_moved_as_said(cell: Cell, transfer: Transfer) -> Iterator[str]:
    """The transport, and that each decode rank has fetched."""
    moved = {line.transport.partition(":")[0] for line in (*transfer.producer, *transfer.consumer) if line.pages}
    if moved != {cell.moves.value}:
        yield f"moved by {moved}"
    if (ranks := {line.consumer_rank for line in transfer.consumer}) != set(range(cell.tp.sizes[1])):
        yield f"fetched by ranks {ranks}"


def not_found_as_said(cell: Cell, served: Sequence[Served], transfers: Sequence[Transfer]) -> Iterator[str]:
    """A prompt, and the same once more: with a prefix cache less of it is computed, and less of it moves.

    Beside a state nothing is found at decode: the state that moved is that of the prompt's end, not of a block's.
    """
    cached = cell.cache is Cache.ON
    wanted = cached, cached and not MODELS[cell.model].has_state
    first, again = (_found(one, transfer) for one, transfer in zip(served, transfers, strict=True))
    if first != (False, False):
        yield f"a prompt that came first was found at prefill and decode: {first}"
    if again != wanted:
        yield f"the repeated prompt was found at prefill and decode: {again} instead of {wanted}"
    computed = [sum(one.prefill.prompt_steps) for one in served]
    if (computed[1] < computed[0]) != wanted[0]:
        yield f"of a prompt {computed[0]} tokens were computed, and then {computed[1]}"
    pages = [sum(line.pages for line in transfer.consumer) for transfer in transfers]
    nbytes = [transfer.nbytes for transfer in transfers]  # none where vLLM's connector sends
    if (pages[1] < pages[0]) != wanted[1] or (any(nbytes) and (nbytes[1] < nbytes[0]) != wanted[1]):
        yield f"of a prompt {pages[0]} pages of {nbytes[0]} bytes moved, and then {pages[1]} of {nbytes[1]}"


def _found(served: Served, transfer: Transfer) -> tuple[bool, bool]:
    return served.prefill.cached_tokens > 0, min((line.start for line in transfer.consumer), default=0) > 0
