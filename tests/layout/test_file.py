"""Layout files: whatever is wrong is named by field; what is right comes back unchanged."""

import json
from typing import Any

import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import encode_layout, parse_layout
from kvferry.testing.layouts import page, worker

GOOD: dict[str, Any] = json.loads(encode_layout(worker([page("l0", heads=(0, 2, 4), tokens=4, nbytes=8)])))


def test_round_trip() -> None:
    layout = parse_layout(json.dumps(GOOD).encode())
    assert parse_layout(encode_layout(layout)) == layout


def test_a_file_is_indented_for_people() -> None:
    lines = encode_layout(worker([page("l0", tokens=4, nbytes=8)])).decode().splitlines()
    assert lines[:3] == ["{", '  "engine_id": "engine",', '  "parallel": {']
    assert lines[3] == '    "tp_rank": 0,'


@pytest.mark.parametrize(("path", "longest"), [
    (("engine_id",), 512), (("components", 0, "layer"), 512), (("components", 0, "axes", 0, "name"), 64),
])  # fmt: skip
def test_names_have_one_character_at_least(path: tuple[str | int, ...], longest: int) -> None:
    for right in ("x", "x" * longest):
        parse_layout(changed(path, right))
    for wrong in ("", "x" * (longest + 1)):
        with pytest.raises(PlanError, match=f"Expected `str` of length.*{path[-1]}"):
            parse_layout(changed(path, wrong))


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            found += paths(inner, (*path, place))
    return found


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    copy = json.loads(json.dumps(GOOD))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(copy).encode()


NOT_NUMBERS = {
    *("format", "engine_id", "layer", "component", "name", "type", "kind", "memory", "optional", "regions", "groups"),
    *("components", "axes", "content", "parallel", "sliding_window", "chunk", "context_parallel"),
}
NUMBERS = [p for p in paths(GOOD) if isinstance(p[-1], str) and p[-1] not in NOT_NUMBERS]


@pytest.mark.parametrize("path", NUMBERS, ids=lambda p: ".".join(map(str, p)))
@pytest.mark.parametrize("value", [-1, 2**63, 10**30, 1.5, True, "7", None, [], {}], ids=repr)
def test_numbers_out_of_range_or_of_another_type(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(PlanError) as refused:
        parse_layout(changed(path, value))
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


REQUIRED = [p for p in paths(GOOD) if p[-1] not in ("memory", "optional", "sliding_window", "chunk", "context_parallel")
            and isinstance(p[-1], str)]  # fmt: skip


@pytest.mark.parametrize("path", REQUIRED, ids=lambda p: ".".join(map(str, p)))
def test_every_required_field_is_missed(path: tuple[str | int, ...]) -> None:
    copy = json.loads(json.dumps(GOOD))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    with pytest.raises(PlanError, match=str(path[-1])) as refused:
        parse_layout(json.dumps(copy).encode())
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_a_truncated_file_is_refused(cut: int) -> None:
    with pytest.raises(PlanError, match="invalid-layout"):
        parse_layout(json.dumps(GOOD).encode()[:cut])


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(PlanError, match="unknown field `strid`"):
        parse_layout(changed(("components", 0, "axes", 0, "strid"), 3))


def test_a_nested_bomb_is_refused() -> None:
    with pytest.raises(PlanError, match="invalid-layout"):
        parse_layout(b"[" * 200_000)
    with pytest.raises(PlanError, match="invalid-layout: nested too deeply"):
        parse_layout(b'{"engine_id":' + b'{"a":' * 200_000)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            "kvferry.layout/2",
            r"this layout file is of version 2 \(kvferry.layout/2\); this kvferry reads kvferry.layout/1$",
        ),
        (
            "kvferry.request/1",
            r"this is a request file \(kvferry.request/1\); a layout file \(kvferry.layout/1\) is wanted",
        ),
        ("kvferry.plan/1", r"this is a plan file"),
        ("KVFERRY.layout/1", r"\$.format is 'KVFERRY.layout/1': this is no file of kvferry's; a layout file"),
        ("x" * 1000, r"\$.format is 'x{64}': this is no file"),
    ],
)
def test_another_kind_of_file_is_named(found: str, said: str) -> None:
    with pytest.raises(PlanError, match=f"^invalid-layout: {said}"):
        parse_layout(changed(("format",), found))
    with pytest.raises(PlanError, match=f"^invalid-layout: {said}"):
        parse_layout(json.dumps({"format": found}).encode())


@pytest.mark.parametrize("memory", ["gpu", "cuda", "cuda:x", "cpu ", ""])
def test_memory_is_cpu_or_a_cuda_device(memory: str) -> None:
    with pytest.raises(PlanError, match="invalid-layout"):
        parse_layout(changed(("regions", 0, "memory"), memory))
