"""Write ``docs/support.md``: what works with what, each entry with its test.

python scripts/make_support.py --results build/cells.jsonl      (``make test-vllm`` runs the cells and then this)

The first table and the list of cells come from the results of ``tests/vllm/test_cells.py --cells all``; the page is not
written when a cell has no result. The other rows say which test shows each of them.
"""

# ruff: noqa: E501 - rows of tables, one a line

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvferry.testing.cell_run import CellOutcome
from kvferry.testing.cells import CELLS, FORBIDDEN, Cell, Model, Peer, Tp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"

EXTRACT = "tests/vllm/layouts/test_extract.py"
FAMILIES = "tests/vllm/layouts/test_families.py"
PIPELINE = "tests/vllm/test_pipeline.py"
MODES = "tests/vllm/test_modes.py"
MODES_LIVE = "tests/vllm/test_modes_live.py"
SCHEDULER = "tests/vllm/test_scheduler.py"
RELEASES_LIVE = "tests/vllm/test_releases_live.py"
DATA_PARALLEL = "tests/vllm/test_data_parallel.py"
DRAFTS = "tests/vllm/test_drafts.py"

PARTS = {
    Model.QWEN3: "full attention, grouped heads",
    Model.GEMMA3: "sliding window beside full attention",
    Model.DEEPSEEK_V2: "MLA (one latent row a token)",
    Model.LFM2: "short convolution state beside attention",
    Model.QWEN3_NEXT: "gated delta net state beside attention",
}
"""What each tiny model stands for."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing, its state, and where that is shown."""

    what: str
    state: str
    where: str


LAYOUTS = (
    Entry("chunked local attention", "layout read from vLLM's own model", f"{FAMILIES}::test_chunked_local_attention"),
    Entry("Mamba2 state", "layout read from vLLM's own model; no engine: vLLM 0.32 does not run it on a CPU", f"{FAMILIES}::test_mamba2"),
    Entry("Mamba1 state beside attention", "layout read from vLLM's own model; no engine: vLLM 0.32 does not run it on a CPU", f"{FAMILIES}::test_mamba1"),
    Entry("Kimi Linear (KDA)", "untested: vLLM 0.32 has no CPU kernels for it (its model needs the module `cutlass`)", ""),
    Entry("fp8 cache", "layout read from vLLM's own model", f"{FAMILIES}::test_fp8_cache"),
    Entry("layers that share a cache", "listed once, read from vLLM's own model", f"{FAMILIES}::test_shared_caches"),
    Entry("rows that pack several layers, all orders of blocks, heads, tokens and layers", "layout read where vLLM's allocator puts it", f"{EXTRACT}::test_every_layout_of_vllm_is_read_where_it_is_written"),
    Entry("circular buffers", "layout read; moved between equal shards only", f"{EXTRACT}::test_ring_buffers_are_opaque_states_of_equal_shards"),
    Entry("DeepSeek-V4 packed rows, indexers", "layout read from vLLM's specs", f"{EXTRACT}::test_a_packed_page_is_cut_as_its_backend_cuts_it"),
    Entry("encoder-decoder attention", "refused at start-up, by layer", f"{EXTRACT}::test_encoder_decoder_attention_is_refused_by_name"),
)  # fmt: skip
"""Parts of models for which no pair of engines runs on a CPU."""

MODE_ENTRIES = (
    Entry("chunked prefill, prefix caching on both sides", "works", "the cells below"),
    Entry("a prompt in chunks is published once, when it is whole", "works", f"{MODES}::test_a_prompt_computed_in_chunks_is_published_once_when_it_is_whole"),
    Entry("only what is missing moves", "works", f"{SCHEDULER}::test_only_what_is_missing_is_pulled"),
    Entry("a full hit moves nothing and frees the producer", "works", f"{SCHEDULER}::test_a_full_hit_pulls_nothing_and_frees_the_producer"),
    Entry("preempted prefill", "works", f"{MODES}::test_a_preempted_prefill_is_computed_again_and_published_once"),
    Entry("preempted decode", "works: computed at decode, not fetched again", f"{MODES}::test_a_preempted_decode_request_is_computed_here_and_pulls_no_second_time"),
    Entry("prompt embeddings, prompt log probabilities", "works: nothing is loaded, the prompt is computed at decode", f"{MODES}::test_a_prompt_whose_cache_does_not_say_enough_is_computed_here"),
    Entry("prompts of one token, answers of one token", "works", f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector"),
    Entry("a first token that ends the request", "works", f"{MODES}::test_a_first_token_that_ends_the_request_ends_it_on_both_sides"),
    Entry("inside vLLM's MultiConnector", "works", f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector"),
    Entry("KV events", "works: blocks that came are told as stored", f"{MODES}::test_blocks_that_came_are_told_as_stored_when_they_are_there"),
    Entry("`cached_tokens`", "works: what was fetched counts as cached", f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector"),
    Entry("pipeline stages 2-1 and 1-2", "works: 2-1 full attention, 1-2 short convolution (the test makes buffers that vLLM 0.32 leaves out on a CPU without a compiler)", f"{PIPELINE}::test_unequal_pipelines"),
    Entry("two data parallel ranks at prefill and at decode, one `vllm serve` each (internal load balancing)", "works: from any rank to any rank", f"{DATA_PARALLEL}::test_from_any_rank_to_any_rank"),
    Entry("the same behind `kvferry serve-router` or `vllm-router`", "works: the ranks take turns", f"{DATA_PARALLEL}::test_a_router_lets_them_take_turns"),
    Entry("data parallel ranks with an API server each (external and hybrid load balancing)", "untested with engines; registered as vLLM's own connector does", ""),
    Entry("data parallel ranks of a mixture of experts", "untested: each registers as others do, but vLLM 0.32 does not run them on a CPU (its communicator there has no `all_gatherv`)", ""),
    Entry("speculative decoding with layers of its own: draft model, Eagle, Eagle3, MTP behind MLA and beside GDN; by repetition beside a sliding window", "works: their cache is fetched too, and in float32 what they guess is what a single engine's guess; blocks that differ, a kernel split, tensor parallel 1-2 and 2-1 among the cases", f"{DRAFTS}::test_the_cache_of_guessing_layers_is_fetched"),
    Entry("speculative decoding at decode only", "works: answers are right, guesses begin without the prompt", f"{DRAFTS}::test_only_decode_guesses"),
    Entry("speculative decoding at prefill only", "works", f"{DRAFTS}::test_only_prefill_guesses"),
    Entry("speculative decoding beside a short convolution, by repetition beside GDN", "untested: on a CPU a single engine of vLLM 0.32 that guesses gives other answers there than one that does not", ""),
    Entry("speculative decoding beside a state, unequal numbers of guesses", "refused with the first transfer, as incompatible content", f"{FAMILIES}::test_a_state_with_room_for_guesses_is_not_one_without"),
    Entry("abort while waiting", "works", "tests/vllm/test_aborts.py::test_aborted_decodes_give_their_blocks_back_on_both_sides"),
    Entry("prefill engine killed or stopped", "works: error or recomputation", "tests/vllm/test_prefill_gone.py::test_the_decode_side_survives"),
    Entry("orderly end with transfers open", "works: under 5 s, no thread left", f"{MODES_LIVE}::test_an_engine_ends_in_time_with_transfers_open"),
    Entry("sleep mode", "refused at start-up", f"{MODES}::test_sleep_mode_is_refused_by_name"),
    Entry("prefill context parallel", "refused at start-up", ""),
    Entry("two `vllm serve` and a router", "works", "tests/router/test_serve.py::test_a_completion"),
    Entry("two `vllm serve` over `cma`, a state beside attention, blocks of 128 and 64, clients that leave", "works", "tests/vllm/test_cells_serve.py::test_a_short_convolution_over_cma_between_unequal_blocks"),
    Entry("`vllm serve` with vLLM's own connector at either end, behind `kvferry serve-router` and `vllm-router`", "works", "tests/vllm/test_cells_serve.py::test_mixed_load_with_vllms_own_connector_at_one_end"),
    Entry("a fleet that moves from vLLM's own connector to kvferry, process by process, under load", "works", "tests/vllm/test_rolling.py::test_a_fleet_moves_from_upstream_to_kvferry_under_load_without_a_wrong_answer"),
)  # fmt: skip
"""Modes of the connector."""

RELEASES = (
    Entry("0.32", "works: all of this page", "the cells below"),
    Entry("0.33, with itself and with 0.32, under kvferry", "works: that release's Python over the CPU kernels of 0.32; one model of each part above, one rank a side", f"{RELEASES_LIVE}::test_two_releases_exchange_caches"),
    Entry("0.33, core cells below", "works: the same", "`make test-release`"),
    Entry("0.33, vLLM's MooncakeConnector at prefill or at decode", "works: the same; with kvferry over 0.32 and over 0.33", f"{RELEASES_LIVE}::test_two_releases_exchange_caches"),
    Entry("0.33, its own kernels", "untested: there is no build of it for a CPU", ""),
    Entry("older than 0.32", "refused at start-up", "tests/vllm/test_releases.py::test_what_is_too_old_is_refused_by_name"),
    Entry("newer than 0.33", "used, with a warning", "tests/vllm/test_releases.py::test_what_was_not_tried_is_used_with_a_warning"),
)  # fmt: skip
"""Releases of vLLM; docs/releases.md has more of it."""

HEAD = """# What works with what

*Works* means, for each entry of the first table and the list of cells: a prefill and a decode engine, real vLLM on the
CPU; digests of the moved pages equal at both ends for every request (where one end is vLLM's own connector, which makes
none: equal to those of the same prompt between two kvferry engines of the same sizes); the answers those of one engine
that does both (token by token where that engine agrees with itself alone and in a batch and computes in float32, else by
teacher-forced log probabilities: within 0.002 in float32, 0.5 in bfloat16); and every block back in all pools. *Layout
read* means that the cache's layout is read right, and no pair of engines was run. *Untested* is what it says. GPU memory,
RDMA and NVLink are untested throughout.

Written by `make test-vllm` on {date}, {machine}, vLLM {vllm}.
"""


def main() -> int:
    """Write the page, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    outcomes = read_outcomes(parser.parse_args().results)
    missing = [cell.name for cell in CELLS if cell.name not in outcomes]
    if missing:
        sys.stderr.write(f"no result of {len(missing)} cells, so the page stays as it is: {', '.join(missing)}\n")
        return 1
    PAGE.write_text("\n".join(page(outcomes)) + "\n")
    return 0


def read_outcomes(path: Path) -> dict[str, CellOutcome]:
    """The last line of each cell."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {one.cell: one for one in (msgspec.json.decode(line, type=CellOutcome) for line in lines)}


def page(outcomes: Mapping[str, CellOutcome]) -> Iterator[str]:
    """Its lines."""
    machine = f"{os.cpu_count()} cores of {platform.machine()}"
    yield HEAD.format(date=datetime.now(UTC).date(), machine=machine, vllm=version("vllm").split("+")[0])
    yield from _parts(outcomes)
    yield from _entries("Parts of models without a pair of engines", LAYOUTS)
    yield from _entries("Modes", MODE_ENTRIES)
    yield from _entries("Releases of vLLM", RELEASES)
    yield from _cells(outcomes)


def _parts(outcomes: Mapping[str, CellOutcome]) -> Iterator[str]:
    yield "## Model part, tensor parallelism, connector\n"
    yield "Numbers are those of the cells below; 1-2: one rank at prefill, two at decode. The last two columns have vLLM's"
    yield "MooncakeConnector at prefill or at decode; more of that in [upstream.md](upstream.md).\n"
    sizes = [tp.value.removeprefix("tp") for tp in Tp]
    yield f"| part | {' | '.join(sizes)} | prefill by vLLM's | decode by vLLM's |"
    yield "|" + "---|" * (len(Tp) + 3)
    for model, part in PARTS.items():
        own = [[c for c in CELLS if c.model is model and c.tp is tp and c.peer is Peer.NONE] for tp in Tp]
        mixed = [[c for c in CELLS if c.model is model and c.peer is peer] for peer in (Peer.PREFILL, Peer.DECODE)]
        yield f"| {part} | {' | '.join(_state(outcomes, cells) for cells in (*own, *mixed))} |"
    yield ""


def _state(outcomes: Mapping[str, CellOutcome], cells: list[Cell]) -> str:
    wrong = [cell for cell in cells if outcomes[cell.name].problems]
    numbers = ", ".join(str(CELLS.index(cell) + 1) for cell in (wrong or cells))
    return f"**fails**: {numbers}" if wrong else f"works: {numbers}" if cells else "untested"


def _entries(title: str, entries: tuple[Entry, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| what | state | test |"
    yield "|---|---|---|"
    for entry in entries:
        yield f"| {entry.what} | {entry.state} | {f'`{entry.where}`' if '::' in entry.where else entry.where} |"
    yield ""


def _cells(outcomes: Mapping[str, CellOutcome]) -> Iterator[str]:
    yield "## The cells\n"
    yield "Every pair of values of two factors that can occur does, in some cell (`kvferry.testing.cells`; `core`: in `make"
    yield "test` too). A cell's test is `tests/vllm/test_cells.py::test_cell[NAME]`. What is in no cell:\n"
    for rule in FORBIDDEN:
        yield f"* {rule.why}"
    yield "\n| | name | core | result | seconds |"
    yield "|---|---|---|---|---|"
    for number, cell in enumerate(CELLS, start=1):
        outcome = outcomes[cell.name]
        result = "works" if not outcome.problems else f"**fails**: {'; '.join(outcome.problems)}"
        yield f"| {number} | `{cell.name}` | {'core' if cell.core else ''} | {result} | {outcome.seconds:.0f} |"


if __name__ == "__main__":
    raise SystemExit(main())
