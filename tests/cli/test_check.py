"""``kvferry check``: the verdict, the counts by value, and that the counts are those of real plans."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.layout import ContextParallel, Group, Layout, Region
from kvferry.testing.commands import call, write_layouts
from kvferry.testing.example_layouts import hybrid, token_major
from kvferry.testing.layouts import at, page, state, worker


def checked(producers: list[Path], consumers: list[Path]) -> dict[str, Any]:
    answer = call(["check", "--producer", *producers, "--consumer", *consumers, "--json"])
    assert (answer.status, answer.err) == (0, "")
    report: dict[str, Any] = json.loads(answer.out)
    return report


def placement(layout: Layout) -> Layout:
    return msgspec.structs.replace(layout, regions=())


def test_two_ranks_to_one_token_major(tmp_path: Path) -> None:
    sides = {"p0": token_major(0, 2, 4096), "p1": token_major(2, 2, 4096), "d": token_major(0, 4, 65_536)}
    paths = write_layouts(tmp_path, **sides)
    report = checked([paths["p0"], paths["p1"]], [paths["d"]])
    assert (report["format"], report["plannable"], report["warnings"]) == ("kvferry.check/1", True, [])
    assert [(p["producer"], p["consumer"]) for p in report["pairs"]] == [(0, 0), (1, 0)]
    for pair in report["pairs"]:
        (one,) = pair["classes"]
        assert (one["layers"], one["components"], one["unit_tokens"]) == ("layers 0..1", ["kv"], 4)
        # Two heads of one token are 32 bytes; each of 4 tokens of 2 layers is a run of its own.
        assert (one["runs_per_block"], one["bytes_per_block"], one["smallest_run"]) == (8, 256, 32)
        assert (pair["descriptors_per_1000_tokens"], pair["bytes_per_1000_tokens"]) == (2000, 64_000)
        assert (pair["descriptors_per_state"], pair["smallest_run"]) == (0, 32)


def test_attention_by_tokens_and_state_by_requests(tmp_path: Path) -> None:
    path = write_layouts(tmp_path, h=hybrid())["h"]
    (pair,) = checked([path], [path])["pairs"]
    attention, state = pair["classes"]
    # Four kernel blocks of a block follow each other on both sides: one run of 512 bytes for each of two layers.
    assert (attention["runs_per_block"], attention["smallest_run"], attention["unit_tokens"]) == (2, 512, 4)
    # conv and ssm touch: one run of 64 + 256 bytes for each of two layers.
    assert (state["runs_per_block"], state["smallest_run"], state["unit_tokens"]) == (2, 320, None)
    assert (pair["descriptors_per_1000_tokens"], pair["descriptors_per_state"]) == (125, 2)
    assert (pair["bytes_per_1000_tokens"], pair["bytes_per_state"]) == (64_000, 640)


def test_groups_over_one_storage_are_measured_with_blocks_of_their_own(tmp_path: Path) -> None:
    """Two groups take turns in the same rows: one run for each block of either, never two reads of one byte."""
    groups = [Group("attention", 4), Group("attention", 4, sliding_window=8)]

    def side(base: int) -> Layout:
        return worker(
            [page(f"m.{g}.attn", tokens=4, nbytes=10, group=g, address=base) for g in range(2)], groups=groups
        )

    paths = write_layouts(tmp_path, p=side(4096), d=side(65_536))
    (pair,) = checked([paths["p"]], [paths["d"]])["pairs"]
    assert pair["descriptors_per_1000_tokens"] == 500
    assert (pair["bytes_per_1000_tokens"], pair["smallest_run"]) == (20_000, 40)


def test_what_padding_would_save_is_measured(tmp_path: Path) -> None:
    """Two layers, and two states, in one row of each block: two runs, or one when the padding between may move."""
    groups = [Group("attention", 4), Group("state", 4)]

    def side(base: int) -> Layout:
        rows = [page(f"m.{n}.attn", tokens=4, nbytes=10, block_stride=128, address=base + 64 * n) for n in range(2)]
        states = [
            state(f"m.{n}.mix", part=(0, 1, 1), nbytes=40, group=1, block_stride=128, address=base + 4096 + 64 * n)
            for n in range(2)
        ]
        return worker([*rows, *states], groups=groups)

    paths = write_layouts(tmp_path, p=side(8192), d=side(65_536))
    (pair,) = checked([paths["p"]], [paths["d"]])["pairs"]
    assert (pair["descriptors_per_1000_tokens"], pair["descriptors_per_1000_tokens_with_padding"]) == (500, 250)
    assert (pair["descriptors_per_state"], pair["descriptors_per_state_with_padding"]) == (2, 1)
    out = call(["check", paths["p"], paths["d"]]).out
    assert "500 descriptors (250 with allow_padding) and 20,000 bytes per 1,000 tokens" in out
    assert "2 descriptors (1 with allow_padding) and 80 bytes of state a request" in out


def test_unequal_blocks_meet_at_their_common_edge(tmp_path: Path) -> None:
    sides = {"p": worker([page("l.0", tokens=6, nbytes=8)]), "d": worker([page("l.0", tokens=4, nbytes=8)])}
    paths = write_layouts(tmp_path, **sides)
    (pair,) = checked([paths["p"]], [paths["d"]])["pairs"]
    # Edges at 4, 6, 8, 12: four runs in twelve tokens.
    assert pair["descriptors_per_1000_tokens"] == pytest.approx(4000 / 12)
    assert pair["classes"][0]["runs_per_block"] == pytest.approx(4 / 3)


def test_the_two_argument_form_and_placements_give_the_same_answer(tmp_path: Path) -> None:
    sides = {"p": hybrid(), "d": hybrid(8192), "q": placement(hybrid()), "e": placement(hybrid(0))}
    paths = write_layouts(tmp_path, **sides)
    long = call(["check", "--producer", paths["p"], "--consumer", paths["d"], "--json"])
    short = call(["check", paths["p"], paths["d"], "--json"])
    placed = call(["check", paths["q"], paths["e"], "--json"])
    assert long.out == short.out == placed.out
    assert long.status == short.status == placed.status == 0


def test_a_missing_context_parallel_rank_is_a_warning(tmp_path: Path) -> None:
    def rank(number: int, size: int) -> Layout:
        group = Group("attention", 16, context_parallel=ContextParallel(number, size, 8))
        return worker([page("l.0", tokens=16, nbytes=8)], groups=[group])

    paths = write_layouts(tmp_path, p=rank(0, 2), d=rank(0, 1))
    report = checked([paths["p"]], [paths["d"]])
    (warning,) = report["warnings"]
    assert "context-parallel rank 1 of 2" in warning
    assert report["pairs"][0]["descriptors_per_1000_tokens"] == pytest.approx(1000 / 16)
    assert "warning: " in call(["check", paths["p"], paths["d"]]).out


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_refusal_is_exit_status_2_and_one_line(tmp_path: Path, words: list[str]) -> None:
    other = worker([page("m.0.attn", tokens=4, nbytes=32)])
    paths = write_layouts(tmp_path, p=other, d=token_major(0, 4, 4096, layers=1))
    answer = call(["check", paths["p"], paths["d"], *words])
    assert answer.refusal["reason"] == "incompatible-content"
    assert "layer 'm.0.attn' component 'kv'" in answer.refusal["message"]
    assert answer.out == ("" if words else "cannot be planned: incompatible-content\n")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    paths = write_layouts(tmp_path, p=hybrid(), d=hybrid())
    paths["d"].write_bytes(paths["d"].read_bytes()[:99])
    refusal = call(["check", paths["p"], paths["d"]]).refusal
    assert refusal["reason"] == "invalid-layout"
    assert "d.json" in refusal["message"]


@pytest.mark.parametrize("words", [[], ["p"], ["p", "p", "p"], ["p", "p", "--producer", "p"], ["--producer", "p"]])
def test_half_a_pair_is_a_usage_error(tmp_path: Path, words: list[str]) -> None:
    path = write_layouts(tmp_path, p=hybrid())["p"]
    answer = call(["check", *(path if word == "p" else word for word in words)])
    assert (answer.status, answer.out) == (2, "")
    assert "Usage" in answer.err


def test_the_table_names_files_and_windows(tmp_path: Path) -> None:
    group = Group("attention", 4, sliding_window=8)
    windowed = worker([page("l.0", tokens=4, nbytes=8)], groups=[group])
    paths = write_layouts(tmp_path, p=windowed, d=windowed)
    out = call(["check", paths["p"], paths["d"]]).out
    assert "can be planned: 1 producer to 1 consumer" in out
    assert "last 8 tokens" in out
    assert "250 descriptors and 8,000 bytes per 1,000 tokens" in out


def test_nothing_in_common_says_so(tmp_path: Path) -> None:
    optional = msgspec.structs.replace(page("draft.0", tokens=4, nbytes=8), optional=True)
    paths = write_layouts(tmp_path, p=worker([page("l.0", tokens=4, nbytes=8)]), d=worker([optional]))
    assert "nothing would move" in call(["check", paths["p"], paths["d"]]).out
    assert checked([paths["p"]], [paths["d"]])["pairs"] == []


def test_extreme_strides_are_measured_without_harm(tmp_path: Path) -> None:
    wide = worker([page("l.0", tokens=1, nbytes=8, num_blocks=2, block_stride=2**61)])
    narrow = worker([page("l.0", tokens=4096, nbytes=8, num_blocks=2)])
    paths = write_layouts(tmp_path, p=wide, d=narrow)
    assert checked([paths["p"]], [paths["d"]])["pairs"][0]["smallest_run"] == 8


@pytest.mark.parametrize("shared", [True, False])
def test_sides_however_unequal_are_measured_soon(tmp_path: Path, shared: bool) -> None:
    """A block of a million million tokens against one of one: a table of so many entries is never made."""
    groups = [Group("attention", 2**40), Group("attention", 2**40 if shared else 1)]
    large = worker([page("l.0", tokens=2**40, nbytes=8, num_blocks=2)], groups=groups)
    small = worker([page("l.0", tokens=1, nbytes=8, num_blocks=2)], groups=[Group("attention", 1)])
    paths = write_layouts(tmp_path, p=large, d=small)
    (pair,) = checked([paths["p"]], [paths["d"]])["pairs"]
    assert pair["smallest_run"] == 8
    assert pair["bytes_per_1000_tokens"] == 8000


def test_memory_at_the_end_of_the_address_space_is_measured_like_any_other(tmp_path: Path) -> None:
    """Made-up blocks lie behind the last one, where these addresses have no room."""

    def side(end: int, tokens: int) -> Layout:
        half = 8 * tokens
        parts = [page("l.0", tokens=tokens, nbytes=8, num_blocks=1, component=name) for name in ("k", "v")]
        regions = [Region(end - 2 * half, half), Region(end - half, half)]
        return worker([at(parts[0], end - 2 * half), at(parts[1], end - half)], regions=regions)

    paths = write_layouts(tmp_path, p=side(2**63 - 1, 4), q=side(2**20, 4), d=side(2**63 - 1, 24))
    high, low = (checked([paths[name]], [paths["d"]])["pairs"] for name in ("p", "q"))
    assert high == low
    assert high[0]["bytes_per_1000_tokens"] == 16_000
