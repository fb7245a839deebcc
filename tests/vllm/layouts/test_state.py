"""Sections of recurrent states: what a rank holds of the whole, against a whole state cut with numpy."""

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.vllm.layouts import Part, StateSpec, StateTensor, TensorRank, state_parts

from .conftest import addresses


def spec(kind: str, shapes: list[tuple[int, ...]], **changed: object) -> StateSpec:
    states = tuple(StateTensor(shape, "float32", 4) for shape in shapes)
    plain = {"layer": "mix", "kind": kind, "states": states, "tp": TensorRank(0, 1), "channels_first": False}
    return StateSpec(**{**plain, **changed})  # type: ignore[arg-type]


def elements(part: Part) -> dict[tuple[tuple[str, int], ...], int]:
    """Coordinates (global) -> index of the float32 in the page."""
    return {names: address // 4 for (names, byte), address in addresses(part).items() if byte == 0}


def filled(parts: tuple[Part, ...], page: np.ndarray) -> dict[tuple[str, tuple[tuple[str, int], ...]], int]:
    """What ``page`` holds, by component and global coordinates."""
    return {(p.name, names): int(page[index]) for p in parts for names, index in elements(p).items()}


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gdn_ranks_together_hold_the_whole_once(size: int, channels_first: bool) -> None:
    key, value_heads, head_v, head_k, taps = 8, 4, 4, 2, 3
    value = value_heads * head_v
    # The whole convolution state, one section after another, each value naming its section, channel and tap.
    whole = {
        name: np.arange(width * taps).reshape(width, taps) + 1000 * at
        for at, (name, width) in enumerate((("q", key), ("k", key), ("v", value)), start=1)
    }
    seen: dict[object, int] = {}
    for rank in range(size):
        local = np.concatenate([np.split(section, size)[rank] for section in whole.values()])
        shape = local.shape if channels_first else local.shape[::-1]
        raw = (local if channels_first else local.T).ravel()
        ssm = 9000 + np.split(np.arange(value_heads), size)[rank].repeat(head_v * head_k)
        found = state_parts(
            spec("GDN_ATTN", [shape, (value_heads // size, head_v, head_k)], tp=TensorRank(rank, size),
                 channels_first=channels_first)
        )  # fmt: skip
        held = filled(found, np.concatenate([raw, ssm]))
        assert not seen.keys() & held.keys()
        seen.update(held)
    for name, section in whole.items():
        for (channel, tap), value_at in np.ndenumerate(section):
            assert seen[f"conv.{name}", (("channel", channel), ("tap", tap))] == value_at
    assert {seen["ssm", (("head", h),)] - 9000 for h in range(value_heads)} == set(range(value_heads))
    assert len(seen) == (2 * key + value) * taps + value_heads


def test_both_orientations_name_the_same_coordinates() -> None:
    names = []
    for first in (False, True):
        shape = (16, 3) if first else (3, 16)
        parts = state_parts(spec("SHORT_CONV", [shape], channels_first=first))
        assert [p.name for p in parts] == ["conv"]
        names.append({(p.name, at) for p in parts for at in elements(p)})
        assert {(a.name, a.total) for p in parts for a in p.axes} == {("channel", 16), ("tap", 3)}
    assert names[0] == names[1]


def test_only_live_bytes_are_listed_of_a_padded_page() -> None:
    parts = state_parts(spec("SHORT_CONV", [(2, 128)]))
    assert sum(len(addresses(p)) for p in parts) == 1024
    assert max(max(addresses(p).values()) for p in parts) == 1023


def mamba2(rank: int, groups: int, size: int, *, whole: int | None) -> tuple[Part, ...]:
    heads, head_dim, state = 8, 4, 16
    held_groups = groups if groups % size == 0 else size
    channels = (heads * head_dim + 2 * held_groups * state) // size
    return state_parts(
        spec("MAMBA2", [(3, channels), (heads // size, head_dim, state)], tp=TensorRank(rank, size),
             whole_channels=whole)
    )  # fmt: skip


def box(part: Part) -> tuple[int, int, int]:
    (channel,) = (axis for axis in part.axes if axis.name == "channel")
    return channel.start, channel.count, channel.total


def test_mamba2_cuts_groups_where_there_are_enough() -> None:
    parts = {p.name: p for p in mamba2(1, groups=2, size=2, whole=32 + 2 * 2 * 16)}
    assert box(parts["conv.x"]) == (16, 16, 32)
    assert box(parts["conv.B"]) == box(parts["conv.C"]) == (16, 16, 32)


def test_mamba2_copies_the_one_group_to_every_rank() -> None:
    for rank in (0, 1):
        parts = {p.name: p for p in mamba2(rank, groups=1, size=2, whole=32 + 2 * 16)}
        assert box(parts["conv.x"]) == (16 * rank, 16, 32)
        assert box(parts["conv.B"]) == box(parts["conv.C"]) == (0, 16, 16)
        # x, B, C one after another in each tap
        assert [parts[n].offset for n in ("conv.x", "conv.B", "conv.C", "ssm")] == [0, 64, 128, 3 * 48 * 4]


@pytest.mark.parametrize(("whole", "message"), [(None, "not known"), (32 + 2 * 24, "neither cut nor copied")])
def test_mamba2_refuses_what_it_cannot_tell_apart(whole: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mamba2(0, groups=2, size=2, whole=whole)


def test_mamba1_channels_are_cut_alike_in_both_states() -> None:
    conv, ssm = state_parts(spec("MAMBA1", [(3, 8), (8, 16)], tp=TensorRank(1, 2)))
    assert box(conv) == box(ssm) == (8, 8, 16)
    assert (ssm.offset, ssm.content.nbytes) == (3 * 8 * 4, 64)


def test_a_replicated_state_is_the_same_everywhere() -> None:
    parts = [state_parts(spec("SHORT_CONV", [(3, 8)], tp=TensorRank(r, 2), replicated=True)) for r in (0, 1)]
    assert parts[0] == parts[1]
    assert box(parts[0][0]) == (0, 8, 8)


def test_records_behind_the_states_move_between_equal_shards_only() -> None:
    parts = state_parts(spec("GDN_ATTN", [(3, 32), (4, 4, 2), (2, 5)], tp=TensorRank(1, 2)))
    assert [p.name for p in parts] == ["conv.q", "conv.k", "conv.v", "ssm", "record.2"]
    record = parts[-1]
    assert [(a.name, a.start, a.count, a.total) for a in record.axes] == [("shard", 1, 1, 2)]
    assert (record.offset, record.content.nbytes) == ((96 + 32) * 4, 40)
    assert record.content.type.startswith("opaque:GDN_ATTN:")


def test_an_unknown_kind_is_one_opaque_state() -> None:
    (part,) = state_parts(spec("CUSTOM", [(3, 8), (4, 4)]))
    assert (part.name, part.content.nbytes) == ("state", (24 + 16) * 4)
    assert [axis.name for axis in part.axes] == ["shard"]


def test_the_narrowest_keys_are_one_channel_each() -> None:
    parts = state_parts(spec("GDN_ATTN", [(3, 18), (4, 4, 2)]))
    assert [box(p) for p in parts[:3]] == [(0, 1, 1), (0, 1, 1), (0, 16, 16)]


def test_sections_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="33 channels are not queries and keys besides 16 of values"):
        state_parts(spec("GDN_ATTN", [(3, 33), (4, 4, 2)]))
