"""The entries of ``docs/support.md``: what works with what, each with the tests that show it.

Of vLLM's own connector and of tensor and pipeline parallel sizes there are grids; the rest are rows. What is said here is
a claim: :mod:`kvferry.testing.support` prints of it what the recorded run has shown.
"""

# ruff: noqa: E501 - rows of tables, one a line

from typing import Final

from kvferry.testing.cells import CELLS, STATEFUL, Cache, Cell, Chunks, Model, Peer, Tp
from kvferry.testing.support import REFUSED, UNTESTED, WORKS, Entry, Grid

VLLM: Final = "tests/vllm"
EXTRACT: Final = f"{VLLM}/layouts/test_extract.py"
FAMILIES: Final = f"{VLLM}/layouts/test_families.py"
RARE: Final = f"{VLLM}/test_rare_caches.py"
REPLICAS: Final = f"{VLLM}/test_replicas.py"
MODES: Final = f"{VLLM}/test_modes.py"
MODES_LIVE: Final = f"{VLLM}/test_modes_live.py"
REQUESTS: Final = f"{VLLM}/test_requests_live.py"
SMALL_POOLS: Final = f"{VLLM}/test_small_pools.py::test_requests_that_are_preempted_on_both_sides_are_answered_right"
SCHEDULER: Final = f"{VLLM}/test_scheduler.py"
RELEASES_LIVE: Final = f"{VLLM}/test_releases_live.py"
DATA_PARALLEL: Final = f"{VLLM}/test_data_parallel.py"
DRAFTS: Final = f"{VLLM}/test_drafts.py"
GONE: Final = f"{VLLM}/test_prefill_gone.py::test_the_decode_side_survives"
ABORTS: Final = f"{VLLM}/test_aborts.py"
UPSTREAM: Final = f"{VLLM}/test_upstream.py"
PREFIXES: Final = f"{VLLM}/test_upstream_prefixes.py"
PULLING: Final = "tests/runtime/test_upstream_pulling.py"
PEERS: Final = "tests/runtime/test_upstream_peers.py"
SERVE: Final = "tests/router/test_serve.py"
CELLS_SERVE: Final = f"{VLLM}/test_cells_serve.py"

PARTS: Final = {
    Model.QWEN3: "full attention, grouped heads",
    Model.GEMMA3: "sliding window beside full attention",
    Model.DEEPSEEK_V2: "MLA (one latent row a token)",
    Model.LFM2: "short convolution state beside attention",
    Model.QWEN3_NEXT: "gated delta net state beside attention",
}
"""What each tiny model stands for."""

_CASES: Final = {
    Model.QWEN3: "dense",
    Model.GEMMA3: "sliding window",
    Model.DEEPSEEK_V2: "latent rows",
    Model.LFM2: "short convolution",
    Model.QWEN3_NEXT: "gated delta net",
}
"""The names of the models in the tests with vLLM's own connector."""

_SIZES: Final = tuple(tp.value.removeprefix("tp") for tp in Tp)


def _entry(model: Model, tp: Tp, peer: Peer, tests: tuple[str, ...] = (), state: str = WORKS) -> Entry:
    def shows(cell: Cell) -> bool:
        return (cell.model, cell.tp, cell.peer) == (model, tp, peer)

    if not tests and not any(map(shows, CELLS)):
        return Entry(what=PARTS[model], state=UNTESTED)
    cells = shows if any(map(shows, CELLS)) else None
    return Entry(what=PARTS[model], state=state, tests=tests, cells=cells, command="make test-vllm")


def _with_upstream(model: Model, tp: Tp, peer: Peer) -> Entry:
    prefill, decode = tp.sizes
    if prefill == decode == 1:
        return _entry(
            model,
            tp,
            peer,
            (f"{UPSTREAM}::test_a_prompt_is_the_same_whoever_computes_and_whoever_writes_it[{_CASES[model]}]",),
        )
    if prefill == decode:
        return _entry(model, tp, peer)
    state = REFUSED if peer is Peer.PREFILL and model in STATEFUL else WORKS
    return _entry(
        model, tp, peer, (f"{UPSTREAM}::test_unequal_tensor_parallel_sizes[{_CASES[model]}-{prefill}-{decode}]",), state
    )


OWN: Final = Grid(
    _SIZES, tuple((part, tuple(_entry(model, tp, Peer.NONE) for tp in Tp)) for model, part in PARTS.items())
)
"""kvferry at both ends, by tensor parallel sizes."""

FROM_UPSTREAM: Final = Grid(
    _SIZES, tuple((part, tuple(_with_upstream(model, tp, Peer.PREFILL) for tp in Tp)) for model, part in PARTS.items())
)
TO_UPSTREAM: Final = Grid(
    _SIZES, tuple((part, tuple(_with_upstream(model, tp, Peer.DECODE) for tp in Tp)) for model, part in PARTS.items())
)


def _stages() -> Grid:
    both, mixed, ranks = (
        f"{VLLM}/test_pipeline.py",
        f"{VLLM}/test_upstream_pipeline.py",
        f"{DATA_PARALLEL}::test_from_any_rank_to_any_rank",
    )
    test = "test_unequal_pipelines"
    names = {Model.QWEN3: "dense", Model.LFM2: "state-and-attention"}
    ours = {(Model.QWEN3, "2-1"), (Model.LFM2, "1-2")}
    theirs = {(Model.QWEN3, sizes) for sizes in ("2-1", "1-2", "2-2")} | {
        (Model.LFM2, sizes) for sizes in ("2-1", "1-2")
    }

    def entry(model: Model, sizes: str, *, upstream: bool) -> Entry:
        case = f"[{names.get(model)}-{sizes.replace('-', '-to-')}]"
        # The tests with vLLM's connector send each prompt between two kvferry engines too.
        tests = [f"{both}::{test}{case}"] if (model, sizes) in ours and not upstream else []
        tests += [f"{mixed}::{test}{case}"] if (model, sizes) in theirs else []
        if not tests:
            return Entry(what=PARTS[model], state=UNTESTED)
        return Entry(what=PARTS[model], state=WORKS, tests=tuple(tests), command="make test-vllm")

    def parallel(model: Model) -> Entry:
        if model is not Model.QWEN3:
            return Entry(what=PARTS[model], state=UNTESTED)
        return Entry(what=PARTS[model], state=WORKS, tests=(ranks,), command="make test-vllm")

    sizes = ("2-1", "1-2", "2-2")
    columns = (
        *(f"pipeline {one}" for one in sizes),
        *(f"pipeline {one}, vLLM's connector at either end" for one in sizes),
        "two data parallel ranks a side",
    )
    rows = []
    for model, part in PARTS.items():
        squares = [entry(model, one, upstream=upstream) for upstream in (False, True) for one in sizes]
        rows.append((part, (*squares, parallel(model))))
    return Grid(columns, tuple(rows))


STAGES: Final = _stages()
"""Pipeline stages and data parallel ranks. The tests make buffers that vLLM leaves out on a CPU without a compiler."""

WITH_UPSTREAM: Final = (
    Entry(what="prefix caching at both ends, full attention", state=WORKS, tests=(f"{UPSTREAM}::test_prefixes_that_the_decode_engine_has_are_not_moved_again",)),
    Entry(what="prefix caching beside a sliding window, hits at prefill, at decode, at both", state=WORKS, tests=(f"{PREFIXES}::test_prompts_that_begin_alike",)),
    Entry(what="prefix caching at a decode engine of vLLM's, beside a state", state=REFUSED, tests=(f"{PEERS}::test_lists_that_contradict_the_prompt_are_named_as_failed[two states]",), remark="it keeps several states for a request, and which is the last cannot be told"),
    Entry(what="prefix caching at a prefill engine of vLLM's, beside a state", state=UNTESTED, remark="the last state of its list is asked for"),
    Entry(what="a prompt of whose window one side has given back a block", state=REFUSED, tests=(f"{PREFIXES}::test_a_block_that_only_the_last_token_looks_at",), remark="where vLLM's decodes; computed at decode where ours does"),
    Entry(what="blocks of 128 and 768 over kernel blocks of 32", state=WORKS, tests=(f"{UPSTREAM}::test_a_prompt_is_the_same_whoever_computes_and_whoever_writes_it[dense, blocks 128 and 768 over 32]",), remark="once declared"),
    Entry(what="blocks of vLLM's prefill engine that do not divide ours; larger kernel blocks there", state=REFUSED, tests=(f"{PULLING}::test_what_upstream_would_write_wrongly_is_refused",), remark="by what is declared"),
    Entry(what="8-bit layers beside 16-bit windows", state=WORKS, tests=(f"{UPSTREAM}::test_a_prompt_is_the_same_whoever_computes_and_whoever_writes_it[two precisions]",)),
    Entry(what="one KV head that all tensor parallel ranks have copies of, 1-2, 2-1, 2-2", state=WORKS, tests=(f"{REPLICAS}::test_with_vllms_own_connector_at_either_end",), command="make test-vllm"),
    Entry(what="several KV heads that some tensor parallel ranks have copies of, unequal sizes", state=REFUSED, tests=("tests/runtime/test_upstream_layout.py::test_heads_that_ranks_have_copies_of_are_refused", f"{PULLING}::test_what_upstream_would_write_wrongly_is_refused")),
    Entry(what="chunked local attention, layers that share a cache, one 8-bit cache, speculative decoding, data parallel ranks", state=UNTESTED, remark="no engine of vLLM's connector was run with them"),
    Entry(what="decode engine of ours, prefill engine of vLLM's that is killed or stopped", state=WORKS, tests=(f"{VLLM}/test_upstream_faults.py::test_a_dead_prefill_engine_of_upstreams_is_noticed_within_ten_seconds",)),
    Entry(what="`vllm serve` with vLLM's own connector at either end, behind `kvferry serve-router` and `vllm-router`", state=WORKS, tests=(f"{CELLS_SERVE}::test_mixed_load_with_vllms_own_connector_at_one_end",), command="make test-vllm"),
    Entry(what="a fleet that moves from vLLM's own connector to kvferry, process by process, under load", state=WORKS, tests=(f"{VLLM}/test_rolling.py::test_a_fleet_moves_from_upstream_to_kvferry_under_load_without_a_wrong_answer",), command="make test-vllm"),
)  # fmt: skip
"""More of what goes with vLLM's own connector at one end, and what does not."""

RARE_PARTS: Final = (
    Entry(what="chunked local attention", state=WORKS, tests=(f"{RARE}::test_it_is_carried[chunked local attention]",), command="make test-vllm"),
    Entry(what="layers that share a cache", state=WORKS, tests=(f"{RARE}::test_it_is_carried[shared caches]",), command="make test-vllm"),
    Entry(what="fp8 cache, e4m3 and e5m2, the same on both sides", state=WORKS, tests=(f"{RARE}::test_it_is_carried[fp8_e4m3]", f"{RARE}::test_it_is_carried[fp8_e5m2]"), command="make test-vllm"),
    Entry(what="one KV head that all tensor parallel ranks have copies of, 1-2, 2-1, 2-2", state=WORKS, tests=(f"{REPLICAS}::test_every_decode_rank_gets_its_copy",), command="make test-vllm"),
    Entry(what="Mamba2 state", state="layout read", tests=(f"{FAMILIES}::test_mamba2",), remark="from vLLM's own model; vLLM 0.32 does not run it on a CPU"),
    Entry(what="Mamba1 state beside attention", state="layout read", tests=(f"{FAMILIES}::test_mamba1",), remark="from vLLM's own model; vLLM 0.32 does not run it on a CPU"),
    Entry(what="Kimi Linear (KDA)", state=UNTESTED, remark="vLLM 0.32 has no CPU kernels for it: its model needs the module `cutlass`, and without that step (`VLLM_KIMI_K3_GEMM_AR=0`) its CPU_MLA backend refuses the block size (`tests/vllm/layouts/test_families.py`)"),
    Entry(what="rows that pack several layers, all orders of blocks, heads, tokens and layers", state="layout read", tests=(f"{EXTRACT}::test_every_layout_of_vllm_is_read_where_it_is_written",), remark="where vLLM's allocator puts it; no engine: attention on the CPU of vLLM 0.32 takes one order only, and its MLA, which starts with any, fails with the first request (`view size is not compatible with input tensor's size and stride`)"),
    Entry(what="circular buffers", state="layout read", tests=(f"{EXTRACT}::test_ring_buffers_are_opaque_states_of_equal_shards",), remark="moved between equal shards only"),
    Entry(what="DeepSeek-V4 packed rows, indexers", state="layout read", tests=(f"{EXTRACT}::test_a_packed_page_is_cut_as_its_backend_cuts_it",), remark="from vLLM's specs"),
    Entry(what="encoder-decoder attention", state=REFUSED, tests=(f"{EXTRACT}::test_encoder_decoder_attention_is_refused_by_name", f"{RARE}::test_an_encoder_beside_a_decoder_is_refused_at_the_start"), remark="at start-up, by layer; a tiny Whisper", command="make test-vllm"),
)  # fmt: skip
"""Parts of models that are in no cell."""

MODE_ENTRIES: Final = (
    Entry(what="chunked prefill, in steps of 192 tokens", state=WORKS, cells=lambda c: c.chunks is Chunks.ON),
    Entry(what="prefix caching: a repeated prompt is found at prefill and at decode", state=WORKS, cells=lambda c: c.cache is Cache.ON and c.model not in STATEFUL),
    Entry(what="prefix caching beside a state: a repeated prompt is found at prefill", state=WORKS, cells=lambda c: c.cache is Cache.ON and c.model in STATEFUL, remark="nothing is found at decode: the state that came is that of the prompt's end, not of a block's"),
    Entry(what="a prompt in chunks is published once, when it is whole", state=WORKS, tests=(f"{MODES}::test_a_prompt_computed_in_chunks_is_published_once_when_it_is_whole",)),
    Entry(what="only what is missing moves", state=WORKS, tests=(f"{SCHEDULER}::test_only_what_is_missing_is_pulled",)),
    Entry(what="a full hit moves nothing and frees the producer", state=WORKS, tests=(f"{SCHEDULER}::test_a_full_hit_pulls_nothing_and_frees_the_producer", f"{REQUESTS}::test_a_full_hit_moves_nothing_and_frees_the_producer")),
    Entry(what="preempted prefill", state=WORKS, tests=(SMALL_POOLS, f"{MODES}::test_a_preempted_prefill_is_computed_again_and_published_once")),
    Entry(what="preempted decode", state=WORKS, tests=(SMALL_POOLS, f"{MODES}::test_a_preempted_decode_request_is_computed_here_and_pulls_no_second_time"), remark="computed at decode, not fetched again"),
    Entry(what="prompt embeddings, prompt log probabilities", state=WORKS, tests=(f"{REQUESTS}::test_a_prompt_whose_cache_does_not_say_enough_is_computed_by_the_decode_engine", f"{MODES}::test_a_prompt_whose_cache_does_not_say_enough_is_computed_here"), remark="nothing is loaded, the prompt is computed at decode"),
    Entry(what="prompts of one token, answers of one token", state=WORKS, tests=(f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector",)),
    Entry(what="a first token that ends the request", state=WORKS, tests=(f"{REQUESTS}::test_a_first_token_that_ends_the_request", f"{MODES}::test_a_first_token_that_ends_the_request_ends_it_on_both_sides")),
    Entry(what="streamed answers", state=WORKS, tests=(f"{SERVE}::test_a_streamed_completion", f"{SERVE}::test_a_chat_and_a_streamed_chat")),
    Entry(what="several prompts in one request", state=WORKS, tests=(f"{SERVE}::test_three_prompts_in_one_request",), remark="a transfer each, where the router gives each its id"),
    Entry(what="several prompts under one transfer id", state=WORKS, tests=(f"{SERVE}::test_a_batch_under_one_transfer_id_is_answered_right", f"{SERVE}::test_the_cache_of_another_prompt_is_refused_and_never_found_later"), remark="one is fetched, the others are computed at decode"),
    Entry(what="inside vLLM's MultiConnector", state=WORKS, tests=(f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector",)),
    Entry(what="KV events", state=WORKS, tests=(f"{REQUESTS}::test_events_name_the_blocks_that_came_when_they_are_there", f"{MODES}::test_blocks_that_came_are_told_as_stored_when_they_are_there"), remark="blocks that came are told as stored"),
    Entry(what="`cached_tokens`, and vLLM's counters of where a prompt came from", state=WORKS, tests=(f"{REQUESTS}::test_counters_and_the_answer_say_where_the_prompt_came_from", f"{MODES_LIVE}::test_small_requests_inside_a_multi_connector"), remark="what was fetched counts as cached"),
    Entry(what="role `kv_both`", state=WORKS, tests=(f"{VLLM}/test_both_roles.py::test_two_engines_in_both_roles_serve_each_other_and_themselves", f"{VLLM}/test_both_roles.py::test_an_engine_in_both_roles_serves_who_comes_without_a_router", f"{VLLM}/test_both_roles.py::test_an_engine_in_both_roles_fetches_from_itself")),
    Entry(what="`verify`: pages compared before they are used", state=WORKS, tests=(f"{VLLM}/test_verify.py::test_no_answer_is_wrong_and_verified_pages_are_counted",)),
    Entry(what="`retries`: another producer is tried", state=WORKS, tests=(f"{VLLM}/test_verify.py::test_no_answer_is_wrong_and_verified_pages_are_counted",), remark="after a page that was wrong"),
    Entry(what="`retries`: a producer is killed, another serves the fetch", state=WORKS, tests=("tests/runtime/test_retries.py::test_a_killed_producers_fetch_is_served_by_the_other_one",), remark="processes without vLLM"),
    Entry(what="speculative decoding with layers of its own: draft model, Eagle, Eagle3, MTP behind MLA and beside GDN; by repetition beside a sliding window", state=WORKS, tests=(f"{DRAFTS}::test_the_cache_of_guessing_layers_is_fetched",), remark="their cache is fetched too, and in float32 what they guess is what a single engine's guess; blocks that differ, a kernel split, tensor parallel 1-2 and 2-1 among the cases"),
    Entry(what="speculative decoding at decode only", state=WORKS, tests=(f"{DRAFTS}::test_only_decode_guesses",), remark="answers are right, guesses begin without the prompt"),
    Entry(what="speculative decoding at prefill only", state=WORKS, tests=(f"{DRAFTS}::test_only_prefill_guesses",)),
    Entry(what="speculative decoding beside a short convolution, by repetition beside GDN", state=UNTESTED, remark="on a CPU a single engine of vLLM 0.32 that guesses gives other answers there than one that does not"),
    Entry(what="speculative decoding beside a state, unequal numbers of guesses", state=REFUSED, tests=(f"{FAMILIES}::test_a_state_with_room_for_guesses_is_not_one_without",), remark="with the first transfer, as incompatible content"),
    Entry(what="data parallel ranks behind `kvferry serve-router` or `vllm-router`, one `vllm serve` a side (internal load balancing)", state=WORKS, tests=(f"{DATA_PARALLEL}::test_a_router_lets_them_take_turns",), remark="the ranks take turns", command="make test-vllm"),
    Entry(what="data parallel ranks with an API server each (external and hybrid load balancing)", state=UNTESTED, remark="with engines; registered as vLLM's own connector does"),
    Entry(what="data parallel ranks of a mixture of experts", state=UNTESTED, remark="each registers as others do, but vLLM 0.32 does not run them on a CPU (its communicator there has no `all_gatherv`)"),
    Entry(what="decode context parallel", state="layout read", tests=(f"{EXTRACT}::test_positions_are_dealt_out_over_decode_context_parallel_ranks",), remark="no engine: vLLM 0.32's attention for the CPU does not return the softmax LSE that it needs"),
    Entry(what="prefill context parallel", state=REFUSED, tests=(f"{VLLM}/test_startup.py::test_prefill_context_parallelism_is_refused_by_name",), remark="at start-up"),
    Entry(what="sleep mode", state=REFUSED, tests=(f"{MODES}::test_sleep_mode_is_refused_by_name",), remark="at start-up"),
    Entry(what="requests aborted while they wait, are computed, are moved, or have begun to answer", state=WORKS, tests=(f"{ABORTS}::test_aborted_decodes_give_their_blocks_back_on_both_sides", f"{ABORTS}::test_a_prompt_aborted_while_it_is_computed", f"{ABORTS}::test_a_prefill_request_aborted_when_its_cache_waits", f"{ABORTS}::test_a_decode_request_aborted_while_bytes_move", f"{ABORTS}::test_one_who_leaves_while_bytes_move_costs_another_nothing", f"{ABORTS}::test_a_decode_request_aborted_after_its_first_token")),
    Entry(what="a storm of aborts", state=WORKS, tests=(f"{VLLM}/test_abort_storm.py::test_no_block_is_lost_in_a_storm_of_aborts",), remark="no block is lost"),
    Entry(what="prefill engine killed or stopped, `kv_load_failure_policy` `fail`: full attention, a state beside it", state=WORKS, tests=(f"{GONE}[fail-SIGKILL-qwen3]", f"{GONE}[fail-SIGKILL-lfm2]"), remark="an error in time"),
    Entry(what="prefill engine killed or stopped, `kv_load_failure_policy` `recompute`: full attention; several groups, a window or a state beside it", state=WORKS, tests=(f"{GONE}[recompute-SIGSTOP-qwen3]", f"{GONE}[recompute-SIGKILL-gemma3]", f"{GONE}[recompute-SIGKILL-lfm2]"), remark="computed at decode"),
    Entry(what="orderly end with transfers open", state=WORKS, tests=(f"{MODES_LIVE}::test_an_engine_ends_in_time_with_transfers_open",), remark="under 5 s, no thread of kvferry's and none of its sockets left; those that importing Mooncake starts stay"),
    Entry(what="orderly end while bytes move", state=WORKS, tests=(f"{VLLM}/test_shutdown.py::test_an_engine_ends_in_time_while_bytes_move",), remark="under 5 s"),
    Entry(what="two `vllm serve` and a router", state=WORKS, tests=(f"{SERVE}::test_a_completion", f"{SERVE}::test_mixed_load_with_clients_that_leave")),
    Entry(what="two `vllm serve` behind `kvferry serve-router` and `vllm-router`: 200 mixed requests, sixteen at a time, clients that leave", state=WORKS, tests=(f"{VLLM}/test_load_routers.py::test_200_mixed_requests_are_answered_right_and_no_block_is_lost",), command="make test-vllm"),
    Entry(what="two `vllm serve` over `cma`, a state beside attention, blocks of 128 and 64, clients that leave", state=WORKS, tests=(f"{CELLS_SERVE}::test_a_short_convolution_over_cma_between_unequal_blocks",), command="make test-vllm"),
)  # fmt: skip
"""Modes of the connector, kvferry at both ends."""

_TRIED: Final = (f"{RELEASES_LIVE}::test_two_releases_exchange_caches",)

RELEASES: Final = (
    Entry(what="0.32", state=WORKS, cells=lambda _: True, remark="this page"),
    Entry(what="0.33, with itself and with 0.32, under kvferry", state=WORKS, tests=_TRIED, remark="that release's Python over the CPU kernels of 0.32; one model of each part above, one rank a side", command="make test-release"),
    Entry(what="0.33, core cells below", state=WORKS, tests=(f"{VLLM}/test_cells.py::test_cell",), remark="the same", command="make test-release", elsewhere=True),
    Entry(what="0.33, vLLM's MooncakeConnector at prefill or at decode", state=WORKS, tests=_TRIED, remark="the same; with kvferry over 0.32 and over 0.33", command="make test-release"),
    Entry(what="0.33, its own kernels", state=UNTESTED, remark="there is no build of it for a CPU"),
    Entry(what="older than 0.32", state=REFUSED, tests=(f"{VLLM}/test_releases.py::test_what_is_too_old_is_refused_by_name",), remark="at start-up"),
    Entry(what="newer than 0.33", state="used, with a warning", tests=(f"{VLLM}/test_releases.py::test_what_was_not_tried_is_used_with_a_warning",)),
)  # fmt: skip
"""Releases of vLLM; docs/releases.md has more of it."""

ROWS: Final = (*WITH_UPSTREAM, *RARE_PARTS, *MODE_ENTRIES, *RELEASES)
