"""``kvferry explain``: the sentences that matter, with the numbers that they must carry."""

from pathlib import Path

import msgspec
import pytest

from kvferry.cli.explain import wrapped
from kvferry.layout import Axis, Component, Content, ContextParallel, Group, Layout
from kvferry.plan import BlockTable, TransferRequest, encode_request
from kvferry.testing.commands import call, write_layouts
from kvferry.testing.example_layouts import hybrid, token_major
from kvferry.testing.layouts import page, worker


def explained(folder: Path, producers: list[Layout], consumers: list[Layout], *more: str | Path) -> str:
    """The text with its line breaks taken out, so that a sentence can be looked for."""
    names = {f"p{i}": p for i, p in enumerate(producers)} | {f"d{i}": d for i, d in enumerate(consumers)}
    paths = write_layouts(folder, **names)
    sides = [[paths[n] for n in names if n.startswith(letter)] for letter in "pd"]
    answer = call(["explain", "--producer", *sides[0], "--consumer", *sides[1], *more])
    assert (answer.status, answer.err) == (0, "")
    return " ".join(answer.out.split())


def test_a_head_split_of_token_major_pages(tmp_path: Path) -> None:
    sides = [token_major(0, 2, 4096), token_major(2, 2, 4096)], [token_major(0, 4, 65_536)]
    text = explained(tmp_path, *sides)
    assert "layers 0..1 kv: head 2..3 of 4 (the producer holds 2..3, the consumer 0..3)" in text
    assert "unit: 4 tokens, the whole block of both sides" in text
    assert "run: 32 bytes = 16 bytes x 2 head; 4 runs in a unit" in text
    assert (
        "token (4 steps): 32 bytes apart at the producer, 64 at the consumer; the run is 32, so the producer's follow "
        "each other and the consumer's have 32 other bytes between"
    ) in text
    assert "descriptors: 8 runs of 2 components in a unit; 1 unit in a consumer's block: 8" in text
    assert "head-major pages on both sides" in text
    assert "one run of 128 bytes in a unit instead of 4 runs of 32" in text


def test_replicas_and_who_reads_which(tmp_path: Path) -> None:
    latent = worker([page("m.0.attn", tokens=4, nbytes=64)])
    text = explained(tmp_path, [latent] * 2, [latent] * 3)
    assert (
        "producers 0, 1 hold equal copies of layer 0 kv; the k-th consumer that needs them reads copy k mod 2" in text
    )
    assert "consumer 0 from producer 0, consumer 1 from producer 1, consumer 2 from producer 0" in text


def test_units_are_limited_by_kernel_blocks(tmp_path: Path) -> None:
    def side(tokens: int, kernels: int) -> Layout:
        return worker([page("l.0", heads=(0, 2, 2), tokens=tokens, nbytes=8, kernel_blocks=kernels, num_blocks=4)])

    text = explained(tmp_path, [side(8, 2)], [side(4, 4)])
    assert "unit: 4 tokens, the largest that divides what is uniform on both sides" in text
    assert "the producer's kernel block has 8 tokens (its 2 kernel blocks lie 128 bytes apart" in text
    assert "the consumer's kernel block has 4 tokens (its 4 kernel blocks lie 64 bytes apart" in text
    assert "head (2 steps): 64 bytes apart at the producer, 32 at the consumer" in text
    assert "equal kernel blocks, now 8 tokens at the producer and 4 at the consumer (a unit of 4)" in text
    assert "order of axes" not in text


def test_kernel_blocks_that_continue_each_other_are_one_piece(tmp_path: Path) -> None:
    def side(tokens: int, kernels: int) -> Layout:
        return worker([page("l.0", tokens=tokens, nbytes=8, kernel_blocks=kernels, num_blocks=4)])

    text = explained(tmp_path, [side(8, 2)], [side(4, 2)])
    assert "the producer's 2 kernel blocks follow each other row by row, 16 tokens in all" in text
    assert "unit: 8 tokens" in text
    assert "blocks of 16 tokens on both sides, now 16 at the producer and 8 at the consumer" in text


def test_interleaves_limit_units(tmp_path: Path) -> None:
    def rank(size: int, interleave: int) -> Layout:
        group = Group("attention", 16, context_parallel=ContextParallel(0, size, interleave))
        return worker([page("l.0", tokens=16, nbytes=8)], groups=[group])

    text = explained(tmp_path, [rank(2, 8)], [rank(4, 4)])
    assert "positions: rank 0 of 2 (8 at a time) met with rank 0 of 4 (4 at a time)" in text
    assert "unit: 4 tokens" in text
    assert "the producer deals positions out 8 at a time; the consumer deals positions out 4 at a time" in text
    assert "equal context-parallel size and interleave on both sides, now (2, 8) and (4, 4)" in text


def test_other_orders_and_spread_blocks(tmp_path: Path) -> None:
    def spread(heads: int) -> Layout:
        axes = (Axis("head", 0, heads, heads, 8 * 32), Axis("token", 0, 4, 4, 8))
        return worker([Component("l.0", 0, "kv", 0, 4096, 8, 32, axes, Content(8, "bytes:8"), 1, 32, 1)])

    head_major = worker([page("l.0", heads=(0, 4, 4), tokens=4, nbytes=8)])
    token_major = worker([page("l.0", heads=(0, 4, 4), tokens=4, nbytes=8, order="token-major")])
    text = explained(tmp_path, [spread(4)], [head_major])
    assert "the producer's head steps (256 bytes) are further apart than its blocks (32)" in text
    text = explained(tmp_path, [token_major], [head_major])
    assert "the same order of axes inside a page on both sides" in text
    assert "16 runs in a unit" in text


def test_what_is_one_run_already_needs_no_advice(tmp_path: Path) -> None:
    text = explained(tmp_path, [hybrid()], [hybrid(8192)])
    assert "nothing in the layouts: every component of a block is one run already" in text
    assert "unit: the whole state, one block on each side" in text
    assert "4 runs of 4 components in a unit, joined to 2 where components touch on both sides, once a request" in text
    assert "4 units in a consumer's block: 8, joined to 2 where units touch on both sides" in text


def keys_and_values(heads: tuple[int, int, int], base: int, *, tokens: int = 4, pages: int = 1) -> Layout:
    """Of each head all keys, column by column, then all values, row by row; so head after head fills the page."""
    start, held, total = heads
    whole = held * tokens * 16

    def part(name: str, at: int, inner: tuple[tuple[str, int, int], ...]) -> Component:
        axes = (Axis("head", start, held, total, tokens * 16), *(Axis(n, 0, c, c, s) for n, c, s in inner))
        return Component("m.0.attn", 0, name, 0, at, 8, whole * pages, axes, Content(2, "x"), pages, whole, 1)

    keys = part("k", base, (("dim", 4, 2 * tokens), ("token", tokens, 2)))
    values = part("v", base + tokens * 8, (("dim", 4, 2), ("token", tokens, 8)))
    return worker([keys, values])


def test_components_that_join_are_not_told_to_fold(tmp_path: Path) -> None:
    """Each of keys and values has a run for each head; together they are one page."""
    text = explained(tmp_path, [keys_and_values((0, 4, 4), 4096)], [keys_and_values((0, 4, 4), 65_536)])
    assert "k run: 32 bytes = 2 bytes x 4 token x 4 dim; 4 runs in a unit" in text
    assert "in all 250 descriptors per 1,000 tokens in scattered blocks, the smallest of 256 bytes" in text
    assert "nothing in the layouts: every component of a block is one run already" in text


def test_pages_that_are_one_run_each_are_told_to_follow_each_other(tmp_path: Path) -> None:
    """Half of the heads: one run in each kernel block, and the other heads lie between two of them."""
    sides = keys_and_values((0, 4, 4), 4096, pages=2), keys_and_values((0, 2, 4), 65_536, pages=2)
    text = explained(tmp_path, [sides[0]], [sides[1]])
    assert "layer 0 k: kernel blocks as large as the block, or pages that follow each other without a gap" in text
    assert "head-major" not in text
    assert "the smallest has 128" in text


def test_padding_that_may_move_is_told_with_its_price(tmp_path: Path) -> None:
    """Two layers in one row of each block, 24 bytes of padding behind each: two runs a block, or one."""

    def rows(base: int) -> Layout:
        parts = [page(f"m.{n}.attn", tokens=4, nbytes=10, block_stride=128, address=base + 64 * n) for n in range(2)]
        return worker(parts)

    text = explained(tmp_path, [rows(4096)], [rows(65_536)])
    assert "in all 500 descriptors per 1,000 tokens" in text
    assert (
        "producer 0 to consumer 0: padding that may move (the library's allow_padding; kvferry plan never moves any) "
        "joins runs of one block: 250 descriptors per 1,000 tokens instead of 500, for 6,000 bytes more"
    ) in text
    assert "allow_padding" not in explained(tmp_path, [token_major(0, 4, 4096)], [token_major(0, 4, 65_536)])


def test_pairs_that_are_planned_alike_are_told_once(tmp_path: Path) -> None:
    sides = [token_major(n, 1, 4096) for n in range(4)]
    text = explained(tmp_path, sides, sides)
    assert text.count("How ") == 1
    assert "and 1 more pair are planned" in text


def test_a_request_adds_what_it_moves(tmp_path: Path) -> None:
    request = tmp_path / "R.json"
    tables = (BlockTable.of([1, 2], first_token=0),), (BlockTable.of([5, 6], first_token=0),)
    request.write_bytes(encode_request(TransferRequest(0, 8, *tables)))
    layout = token_major(0, 4, 4096)
    text = explained(tmp_path, [layout], [msgspec.structs.replace(layout, regions=())], "--request", request)
    assert (
        "This request, tokens [0, 8) producer 0 to consumer 0: 2 descriptors, 1,024 bytes, runs of 512 to 512" in text
    )
    assert "over mooncake: direct (direct " in text
    request.write_bytes(encode_request(TransferRequest(8, 8, *tables)))
    assert "nothing to move" in explained(tmp_path, [layout], [layout], "--request", request)


def test_refusals_are_those_of_plan(tmp_path: Path) -> None:
    paths = write_layouts(tmp_path, p=token_major(0, 2, 4096), d=token_major(0, 4, 4096))
    answer = call(["explain", "--producer", paths["p"], "--consumer", paths["d"]])
    assert (answer.out, answer.refusal["reason"]) == ("", "missing-coordinates")
    bad = call(["explain", "--producer", paths["p"], "--consumer", paths["p"], "--request", tmp_path / "none.json"])
    assert (bad.out, bad.refusal["reason"]) == ("", "invalid-request")


@pytest.mark.parametrize(("line", "indent"), [("x " * 200, 4), ("    " + "x " * 200, 8)])
def test_long_lines_are_continued_further_in(line: str, indent: int) -> None:
    rows = wrapped(line).split("\n")
    assert len(rows) > 1
    assert all(len(row) <= 116 for row in rows)
    assert all(len(row) - len(row.lstrip()) == indent for row in rows[1:])
