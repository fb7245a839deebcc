"""``kvferry inspect``: the sums by value, the picture to scale, and bad input without a traceback."""

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from kvferry.layout import Axis, Component, Content, Group, Layout, Region
from kvferry.testing.commands import call, write_layouts
from kvferry.testing.example_layouts import hybrid
from kvferry.testing.layouts import page, side_by_side, worker

SVG = "{http://www.w3.org/2000/svg}"


def inspected(path: Path) -> dict:
    answer = call(["inspect", path, "--json"])
    assert (answer.status, answer.err) == (0, "")
    return json.loads(answer.out)


def test_sums_of_a_hybrid_with_a_shared_storage(tmp_path: Path) -> None:
    report = inspected(write_layouts(tmp_path, h=hybrid())["h"])
    attention, state = report["groups"]
    assert (attention["live_bytes_per_block"], attention["padded_bytes_per_block"]) == (1024, 1024)
    assert (attention["live_bytes_per_token"], attention["live_bytes_per_1000_tokens"]) == (64, 64_000)
    assert (state["live_bytes_per_block"], state["padded_bytes_per_block"]) == (640, 1024)
    assert state["live_bytes_per_token"] is None
    assert (attention["overlays"], state["overlays"]) == ([1], [0])
    kv, conv, ssm = report["components"]
    assert (kv["layers"], kv["pages"], kv["page_live_bytes"], kv["page_stride"]) == ("layers 1, 3", 4, 128, 128)
    assert (conv["layers"], conv["component"], conv["live_bytes_per_block"]) == ("layers 0, 2", "conv", 64)
    assert (ssm["live_bytes_per_block"], ssm["padded_bytes_per_block"], ssm["shares_frame"]) == (256, 512, True)
    assert [s["live_bytes"] for s in report["storages"]] == [4096]
    assert [s["total_bytes"] for s in report["storages"]] == [4096]


def test_padding_counts_against_coverage(tmp_path: Path) -> None:
    padded = worker([page("l.0", tokens=4, nbytes=10, num_blocks=5, block_stride=64)], regions=[Region(0, 400)])
    report = inspected(write_layouts(tmp_path, p=padded)["p"])
    assert report["groups"][0]["live_bytes_per_block"] == 40
    assert report["groups"][0]["padded_bytes_per_block"] == 64
    assert report["storages"] == [
        {"memory": "cpu", "regions": [[0, 400]], "total_bytes": 400, "live_bytes": 200}
    ]  # fmt: skip


def test_equal_layers_are_one_row_and_one_bar(tmp_path: Path) -> None:
    layers = side_by_side([page(f"model.layers.{n}.attn", tokens=16, nbytes=8) for n in range(61)], base=4096)
    path = write_layouts(tmp_path, m=worker(layers))["m"]
    (row,) = inspected(path)["components"]
    assert (row["layers"], row["pattern"], len(row["layer_names"])) == ("layers 0..60", "model.layers.*.attn", 61)
    svg = tmp_path / "m.svg"
    out = call(["inspect", path, "--svg", str(svg)]).out
    assert "layers 0..60" in out
    words = [e.text for e in ElementTree.parse(svg).iter(f"{SVG}text")]
    assert "layers 0..60, 61 frames alike: 128 B for a block" in words


def test_a_spread_block_has_no_padding_of_other_blocks(tmp_path: Path) -> None:
    axes = (Axis("head", 0, 4, 4, 10 * 64), Axis("token", 0, 8, 8, 8))
    spread = worker([Component("l.0", 0, "kv", 0, 4096, 10, 64, axes, Content(8, "x"), 1, 64, 1)])
    path = write_layouts(tmp_path, s=spread)["s"]
    group = inspected(path)["groups"][0]
    assert (group["live_bytes_per_block"], group["padded_bytes_per_block"]) == (256, 256)
    svg = tmp_path / "s.svg"
    call(["inspect", path, "--svg", str(svg), "--blocks", "3-4"])
    runs = [e for e in ElementTree.parse(svg).iter(f"{SVG}rect") if "block 3" in (e.findtext(f"{SVG}title") or "")]
    assert len(runs) == 4  # one for each head


def test_context_parallel_shares_the_cost_of_a_token(tmp_path: Path) -> None:
    one = worker([page("l.0", tokens=16, nbytes=8)])
    group = msgspec.convert(
        {"kind": "attention", "block_tokens": 16, "context_parallel": {"rank": 1, "size": 2, "interleave": 8}}, Group
    )
    path = write_layouts(tmp_path, c=msgspec.structs.replace(one, groups=(group,)))["c"]
    assert inspected(path)["groups"][0]["live_bytes_per_token"] == 4
    assert "holds context-parallel rank 1 of 2, 8 at a time" in call(["inspect", path]).out


def test_placements_are_taken(tmp_path: Path) -> None:
    path = write_layouts(tmp_path, h=msgspec.structs.replace(hybrid(), regions=()))["h"]
    report = inspected(path)
    assert (report["fingerprint"], report["storages"]) == (None, [])
    assert report["groups"][1]["live_bytes_per_block"] == 640
    assert "no regions" in call(["inspect", path]).out


def rects(svg: Path, tip: str) -> list[tuple[float, float]]:
    """(x, width) of rectangles whose tooltip begins with ``tip``."""
    found = [e for e in ElementTree.parse(svg).iter(f"{SVG}rect") if (e.findtext(f"{SVG}title") or "").startswith(tip)]
    return [(float(e.get("x", "nan")), float(e.get("width", "nan"))) for e in found]


def test_the_picture_is_to_scale(tmp_path: Path) -> None:
    path, svg = write_layouts(tmp_path, h=hybrid())["h"], tmp_path / "h.svg"
    call(["inspect", path, "--svg", str(svg), "--blocks", "1-2"])
    (first, second) = rects(svg, "m.0.mix ssm")
    (conv, _) = rects(svg, "m.0.mix conv")
    (bar, _) = rects(svg, "padding: 0 bytes"), rects(svg, "padding: 192 bytes")
    scale = bar[0][1] / 1024
    assert first[1] == pytest.approx(256 * scale, abs=0.02)
    assert conv[1] == pytest.approx(64 * scale, abs=0.02)
    assert first[0] - conv[0] == pytest.approx(64 * scale, abs=0.02)
    assert second[0] - first[0] == pytest.approx(512 * scale, abs=0.02)


def test_interleaved_components_share_the_height(tmp_path: Path) -> None:
    def side(name: str, offset: int) -> Component:
        axes = (Axis("token", 0, 4096, 4096, 16),)
        return Component("l.0", 0, name, 0, 4096 + offset, 2, 65_536, axes, Content(8, "x"), 1, 65_536, 1)

    path, svg = write_layouts(tmp_path, i=worker([side("k", 0), side("v", 8)]))["i"], tmp_path / "i.svg"
    call(["inspect", path, "--svg", str(svg)])
    heights = {
        e.get("height")
        for e in ElementTree.parse(svg).iter(f"{SVG}rect")
        if (e.findtext(f"{SVG}title") or "").startswith("l.0 ")
    }
    assert heights == {"22"}


def test_blocks_without_a_picture_are_a_usage_error(tmp_path: Path) -> None:
    """They only say what is drawn; nothing that is asked for is left undone in silence."""
    path = write_layouts(tmp_path, h=hybrid())["h"]
    answer = call(["inspect", path, "--blocks", "1"])
    assert (answer.status, answer.out) == (2, "")
    assert "--svg" in answer.err


def test_the_picture_that_was_written_is_named_to_people_only(tmp_path: Path) -> None:
    path, svg = write_layouts(tmp_path, h=hybrid())["h"], tmp_path / "h.svg"
    assert call(["inspect", path, "--svg", svg]).out.startswith(f"wrote {svg}\n")
    svg.unlink()
    answer = call(["inspect", path, "--svg", svg, "--json"])
    assert (json.loads(answer.out)["format"], answer.err) == ("kvferry.inspect/1", "")
    assert svg.exists()


@pytest.mark.parametrize(("columns", "widest"), [("120", 120), ("", 190), ("many", 190)])
def test_a_piped_table_is_as_wide_as_columns_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str, widest: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    layers = side_by_side([page(f"{'very.' * 30}long.{n}.attn", tokens=4, nbytes=8) for n in range(2)], base=0)
    out = call(["inspect", write_layouts(tmp_path, m=worker(layers))["m"]]).out
    assert max(len(line) for line in out.splitlines()) == widest


@pytest.mark.parametrize("blocks", ["4", "3-9", "2-1", "x", "-1", "1-2-3", "0-", "1.5", "9" * 5000])
def test_blocks_that_are_not_there_are_a_usage_error(tmp_path: Path, blocks: str) -> None:
    path = write_layouts(tmp_path, h=hybrid())["h"]
    answer = call(["inspect", path, "--svg", str(tmp_path / "h.svg"), f"--blocks={blocks}"])
    assert answer.status == 2
    assert "--blocks" in answer.err
    assert not (tmp_path / "h.svg").exists()


def test_a_picture_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    path = write_layouts(tmp_path, h=hybrid())["h"]
    answer = call(["inspect", path, "--svg", str(tmp_path / "none" / "h.svg")])
    assert answer.status == 2
    assert "--svg" in answer.err


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[1]", b'{"format": "kvferry.layout/1"}', b"[" * 100_000])
def test_what_is_no_layout_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    answer = call(["inspect", str(path), "--json"])
    assert answer.out == ""
    error = answer.refusal
    assert error["reason"] == "invalid-layout"
    assert "bad.json" in error["message"]


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    odd = worker([page("<b>[red]&.0", tokens=4, nbytes=8, component='k"<')], engine_id="a<b>&")
    path, svg = write_layouts(tmp_path, o=odd)["o"], tmp_path / "o.svg"
    assert "<b>[red]&.*" in call(["inspect", path, "--svg", str(svg)]).out.replace("\n", "")
    assert any("a<b>&" in (e.text or "") for e in ElementTree.parse(svg).iter(f"{SVG}text"))


def test_huge_numbers_do_no_harm(tmp_path: Path) -> None:
    def layout() -> Layout:
        return worker([page("l.0", tokens=8, nbytes=8, num_blocks=2**40)], regions=[Region(0, 2**62)])

    path, svg = write_layouts(tmp_path, g=layout())["g"], tmp_path / "g.svg"
    last = str(2**40 - 1)
    assert call(["inspect", path, "--svg", str(svg), "--blocks", last]).status == 0
    assert inspected(path)["storages"][0]["live_bytes"] == 2**46


def test_a_layout_without_components_is_empty_not_an_error(tmp_path: Path) -> None:
    empty = msgspec.structs.replace(hybrid(), components=())
    path = write_layouts(tmp_path, e=empty)["e"]
    assert inspected(path)["components"] == []
    assert call(["inspect", path, "--svg", str(tmp_path / "e.svg")]).status == 2  # no block to draw


def test_pages_that_reach_into_each_other_are_drawn_in_full(tmp_path: Path) -> None:
    """The pages of a block take turns, row by row: one of them is not what lies between two page starts."""
    rows = Axis("token", 0, 100_000, 100_000, 16)
    turns = Component("l.0", 0, "kv", 0, 0, 2, 3_200_000, (rows,), Content(8, "x"), 2, 8, 1)
    path, svg = (
        write_layouts(tmp_path, t=worker([turns], groups=[Group("attention", 200_000)]))["t"],
        tmp_path / "t.svg",
    )
    assert call(["inspect", path, "--svg", str(svg)]).status == 0
    assert svg.stat().st_size < 100_000


def test_names_that_xml_cannot_say(tmp_path: Path) -> None:
    path = write_layouts(tmp_path, o=worker([page("l.0", tokens=4, nbytes=8)], engine_id="a\x1b[0m\x00b"))["o"]
    svg = tmp_path / "o.svg"
    assert call(["inspect", path, "--svg", str(svg)]).status == 0
    assert any("engine a?[0m?b" in (e.text or "") for e in ElementTree.parse(svg).iter(f"{SVG}text"))
