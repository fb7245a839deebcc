"""``kvferry plan --svg``: every ribbon is a run of the plan, at its place and to scale."""

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvferry.layout import Axis, Component, Content, ContextParallel, Group, Layout
from kvferry.plan import BlockTable, TransferRequest, encode_request
from kvferry.testing.commands import call, write_layouts
from kvferry.testing.example_layouts import hybrid, token_major
from kvferry.testing.layouts import page, worker

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Picture:
    root: ElementTree.Element

    @property
    def ribbons(self) -> list[str]:
        """Tooltips of the bands between the two rows."""
        return [e.findtext(f"{SVG}title") or "" for e in self.root.iter(f"{SVG}path")]

    @property
    def words(self) -> list[str]:
        return [e.text or "" for e in self.root.iter(f"{SVG}text")]

    def rects(self, tip: str) -> list[tuple[float, float, float]]:
        """(x, y, width) of rectangles with this tooltip."""
        found = [e for e in self.root.iter(f"{SVG}rect") if e.findtext(f"{SVG}title") == tip]
        return [tuple(float(e.get(k, "nan")) for k in ("x", "y", "width")) for e in found]  # type: ignore[misc]


def picture(folder: Path, producers: list[Layout], consumers: list[Layout], request: TransferRequest) -> Picture:
    names = {f"p{i}": p for i, p in enumerate(producers)} | {f"d{i}": d for i, d in enumerate(consumers)}
    paths = write_layouts(folder, **names)
    sides = [[paths[n] for n in names if n.startswith(letter)] for letter in "pd"]
    (folder / "R.json").write_bytes(encode_request(request))
    words = ["plan", "--producer", *sides[0], "--consumer", *sides[1], "--request", folder / "R.json"]
    answer = call([*words, "--svg", folder / "plan.svg"])
    assert (answer.status, answer.err) == (0, "")
    return Picture(ElementTree.parse(folder / "plan.svg").getroot())


def tables(*blocks: int, first: int = 0) -> tuple[BlockTable, ...]:
    return (BlockTable.of(list(blocks), first_token=first),)


def test_two_ranks_to_one(tmp_path: Path) -> None:
    sides = [token_major(0, 2, 4096), token_major(2, 2, 4096)], [token_major(0, 4, 65_536)]
    drawn = picture(tmp_path, *sides, TransferRequest(0, 8, tables(1, 5), tables(6, 3)))
    # Two producers x two blocks x four tokens of the first layer.
    assert len(drawn.ribbons) == 16
    assert "32 bytes: producer 1 block 5 +64 to consumer 0 block 3 +160" in drawn.ribbons
    (up, down) = drawn.rects("32 bytes: producer 1 block 5 +64 to consumer 0 block 3 +160")
    (first_up, first_down) = drawn.rects("32 bytes: producer 1 block 5 +0 to consumer 0 block 3 +32")
    assert up[2] == pytest.approx(down[2])
    assert up[0] - first_up[0] == pytest.approx(2 * up[2], abs=0.05)
    assert down[0] - first_down[0] == pytest.approx(4 * down[2], abs=0.05)
    assert up[1] < down[1]
    assert "from producer 1: p1.json" in drawn.words
    assert any(words.startswith("16 runs drawn; and 1 more of the layers") for words in drawn.words)


def test_a_run_over_several_blocks_is_cut_at_the_blocks_drawn(tmp_path: Path) -> None:
    layout = worker([page("l.0", tokens=4, nbytes=16)])
    drawn = picture(tmp_path, [layout], [layout], TransferRequest(0, 20, tables(1, 2, 3, 4, 5), tables(0, 1, 2, 3, 4)))
    assert drawn.ribbons == [
        f"64 bytes: producer 0 block {n + 1} +0 to consumer 0 block {n} +0" for n in range(3)
    ]  # fmt: skip
    assert any("and 2 more of the consumer's blocks" in words for words in drawn.words)


def test_unequal_blocks_and_a_range_that_begins_inside(tmp_path: Path) -> None:
    sides = [worker([page("l.0", tokens=8, nbytes=16)])], [worker([page("l.0", tokens=4, nbytes=16)])]
    drawn = picture(tmp_path, *sides, TransferRequest(6, 12, tables(2, 7), tables(1, 3, first=4)))
    assert drawn.ribbons == [
        "32 bytes: producer 0 block 2 +96 to consumer 0 block 1 +32",
        "64 bytes: producer 0 block 7 +0 to consumer 0 block 3 +0",
    ]
    assert {"tokens 0..7", "tokens 8..15", "tokens 4..7", "tokens 8..11"} <= set(drawn.words)


def test_state_and_attention_have_panels_of_their_own(tmp_path: Path) -> None:
    side = (BlockTable.of([1], first_token=0), BlockTable.of([2]))
    drawn = picture(tmp_path, [hybrid()], [hybrid(8192)], TransferRequest(0, 16, side, side))
    assert {"m.1.attn, kv", "m.0.mix, conv", "m.0.mix, ssm"} <= set(drawn.words)
    assert "256 bytes: producer 0 block 2 +0 to consumer 0 block 2 +0" in drawn.ribbons


def test_a_spread_block_is_drawn_in_its_pieces(tmp_path: Path) -> None:
    axes = (Axis("head", 0, 2, 2, 8 * 32), Axis("token", 0, 4, 4, 8))
    spread = worker([Component("l.0", 0, "kv", 0, 4096, 8, 32, axes, Content(8, "bytes:8"), 1, 32, 1)])
    plain = worker([page("l.0", heads=(0, 2, 2), tokens=4, nbytes=8)])
    drawn = picture(tmp_path, [plain], [spread], TransferRequest(0, 4, tables(3), tables(5)))
    assert drawn.ribbons == [
        "32 bytes: producer 0 block 3 +0 to consumer 0 block 5 +0",
        "32 bytes: producer 0 block 3 +32 to consumer 0 block 5 +0",
    ]


def test_many_runs_are_counted_not_drawn(tmp_path: Path) -> None:
    def side(first: int, count: int) -> Layout:
        return worker([page("l.0", heads=(first, count, 2), tokens=2048, nbytes=8, order="token-major", num_blocks=2)])

    sides, whole = [side(0, 1), side(1, 1)], side(0, 2)
    drawn = picture(tmp_path, sides, [whole], TransferRequest(0, 2048, tables(1), tables(0)))
    assert len(drawn.ribbons) == 600
    assert any("and 3,496 more runs between these blocks" in words for words in drawn.words)


def test_nothing_to_move_is_said(tmp_path: Path) -> None:
    layout = worker([page("l.0", tokens=4, nbytes=16)])
    drawn = picture(tmp_path, [layout], [layout], TransferRequest(4, 4, tables(1), tables(1)))
    assert drawn.ribbons == []
    assert any(words.startswith("nothing to move") for words in drawn.words)


def test_a_refused_plan_draws_nothing(tmp_path: Path) -> None:
    paths = write_layouts(tmp_path, p=token_major(0, 2, 4096), d=token_major(0, 4, 4096))
    (tmp_path / "R.json").write_bytes(encode_request(TransferRequest(0, 4, tables(1), tables(1))))
    words = ["plan", "--producer", paths["p"], "--consumer", paths["d"], "--request", tmp_path / "R.json"]
    answer = call([*words, "--svg", tmp_path / "plan.svg"])
    assert answer.refusal["reason"] == "missing-coordinates"
    assert not (tmp_path / "plan.svg").exists()


def test_a_first_block_that_belongs_to_other_ranks(tmp_path: Path) -> None:
    """Three copies of context-parallel rank 0 of 2: they need nothing of the block in which the request begins."""

    def side(number: int) -> Layout:
        group = Group("attention", 2, context_parallel=ContextParallel(0, 2, 2))
        return worker([page("l.0", tokens=2, nbytes=8, address=4096 * number)], groups=[group])

    request = TransferRequest(6, 10, tables(1, first=8), tables(2, 3, first=4))
    drawn = picture(tmp_path, [side(0)], [side(1), side(2), side(3)], request)
    assert any(words.startswith("3 descriptors") for words in drawn.words)
