"""A placement is what survives a move of the memory; a binding is what does not."""

import msgspec
import pytest

from kvferry.errors import PlanError
from kvferry.layout import (
    Binding,
    Layout,
    Placement,
    Region,
    bind_layout,
    decode_placement,
    encode_placement,
    regions_of,
)
from kvferry.layout.placement import Placed, Span, Storage, extents_of
from kvferry.testing.layouts import at, page, side_by_side, worker


def two_tensors(first: int, second: int) -> Layout:
    """Two layers in two allocations of their own."""
    one, two = at(page("l0", tokens=4, nbytes=8), first), at(page("l1", tokens=4, nbytes=8), second)
    return worker([one, two], regions=[Region(first, 256), Region(second, 256)])


def test_equal_allocations_elsewhere_are_one_placement() -> None:
    here, there = bind_layout(two_tensors(4096, 8192)), bind_layout(two_tensors(70_000, 1_000_000))
    assert here.placement == there.placement
    assert here.placement.fingerprint == there.placement.fingerprint
    assert here.placement != here.placement.fingerprint
    assert here.placement != bind_layout(two_tensors(4096, 4352)).placement
    assert here.binding == Binding((4096, 8192))
    assert there.binding == Binding((70_000, 1_000_000))


def test_touching_regions_share_a_storage() -> None:
    bound = bind_layout(two_tensors(4096, 4352))
    assert bound.binding == Binding((4096,))
    assert extents_of(bound.placement, bound.binding).seams.tolist() == [4352]
    assert [p.component.address for p in bound.placement.placed] == [0, 256]


def test_regions_spanned_by_one_component_share_a_storage() -> None:
    component = page("l0", tokens=4, nbytes=2, num_blocks=3, block_stride=100)
    bound = bind_layout(worker([component], regions=[Region(0, 8), Region(100, 8), Region(200, 8), Region(500, 8)]))
    assert bound.binding == Binding((0, 500))
    assert [span.offset for span in bound.placement.storages[0].spans] == [0, 100, 200]
    assert extents_of(bound.placement, bound.binding).seams.tolist() == []


@pytest.mark.parametrize("gap", [0, 36])
def test_a_component_in_two_memories_is_refused(gap: int) -> None:
    """Whether its second block lies right behind the first memory, or further away."""
    component = page("l0", tokens=4, nbytes=16, num_blocks=2, block_stride=64 + gap)
    regions = [Region(0, 64, "cpu"), Region(64 + gap, 64, "cuda:0")]
    with pytest.raises(PlanError, match=r"unsupported: one component spans regions of \['cpu', 'cuda:0'\]"):
        bind_layout(worker([component], regions=regions))


@pytest.mark.parametrize("layout", [two_tensors(4096, 8192), two_tensors(4096, 4352)])
def test_placement_survives_the_wire(layout: Layout) -> None:
    placement = bind_layout(layout).placement
    assert decode_placement(encode_placement(placement)) == placement


def test_regions_come_back_from_placement_and_binding() -> None:
    layout = two_tensors(4096, 8192)
    bound = bind_layout(layout)
    assert regions_of(bound.placement, bound.binding) == layout.regions
    with pytest.raises(PlanError, match="1 bases, the placement 2 storages"):
        regions_of(bound.placement, Binding((4096,)))


def test_a_binding_under_which_regions_meet_is_refused() -> None:
    """A peer sends the bases of its memory: two storages of one placement cannot lie on one byte."""
    placement = bind_layout(two_tensors(4096, 8192)).placement
    for bases in ((4096, 4351), (4351, 4096), (4096, 4096)):
        with pytest.raises(PlanError, match=r"invalid-layout.*\[4096, 4352\].*overlap"):
            regions_of(placement, Binding(bases))
    limit = 2**63 - 1
    assert regions_of(placement, Binding((limit - 256, 0)))[0].stop == limit
    with pytest.raises(PlanError, match="reaches past"):
        regions_of(placement, Binding((limit - 255, 0)))


def test_seams_are_where_regions_touch_whatever_storage_they_are_of() -> None:
    placement = bind_layout(two_tensors(4096, 8192)).placement
    for bases, seams in (((4096, 4352), [4352]), ((4352, 4096), [4352]), ((4096, 4353), [])):
        assert extents_of(placement, Binding(bases)).seams.tolist() == seams


def test_a_storage_without_regions_is_refused() -> None:
    placement = bind_layout(two_tensors(4096, 8192)).placement
    with pytest.raises(PlanError, match="at least one region"):
        Storage("cpu", ())
    data = encode_placement(placement).replace(
        msgspec.msgpack.encode(placement.storages[0]), b"\x82\xa6memory\xa3cpu\xa5spans\x90"
    )
    with pytest.raises(PlanError, match="at least one region"):
        decode_placement(data)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x91" * 4000, b"\xff" * 100])
def test_garbage_from_a_peer_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="invalid-layout"):
        decode_placement(data)


def test_a_peers_placement_of_another_version_is_refused() -> None:
    data = encode_placement(bind_layout(two_tensors(4096, 8192)).placement)
    assert b"kvferry.placement/1" in data
    with pytest.raises(PlanError, match="invalid-layout.*placement/2"):
        decode_placement(data.replace(b"kvferry.placement/1", b"kvferry.placement/2"))


def test_a_peers_placement_is_held_to_the_memory_rule() -> None:
    placement = bind_layout(worker([page("l0", tokens=4, nbytes=8)])).placement
    placed = placement.placed[0]
    component = msgspec.structs.replace(placed.component, block_stride=16)
    wrong = Placement(placement.groups, placement.storages, (msgspec.structs.replace(placed, component=component),))
    with pytest.raises(PlanError, match="overlapping-memory"):
        decode_placement(encode_placement(wrong))


def test_a_peers_placement_names_storages_that_it_has() -> None:
    placement = bind_layout(two_tensors(4096, 8192)).placement
    for storage in (2, 3):
        placed = (placement.placed[0], msgspec.structs.replace(placement.placed[1], storage=storage))
        wrong = Placement(placement.groups, placement.storages, placed)
        with pytest.raises(PlanError, match=f"storage {storage} of 2"):
            decode_placement(encode_placement(wrong))


def test_a_peers_placement_is_in_canonical_form() -> None:
    """Two tensors that move independently, told as one storage: the binding would have to keep their distance."""
    apart = bind_layout(two_tensors(0, 8192)).placement
    spans = (Span(0, 256), Span(8192, 256))
    second = apart.placed[1].component
    placed = (apart.placed[0], Placed(0, msgspec.structs.replace(second, address=8192)))
    with pytest.raises(PlanError, match="not in canonical form"):
        decode_placement(encode_placement(Placement(apart.groups, (Storage("cpu", spans),), placed)))


def test_overlays_name_groups_whose_ranges_meet() -> None:
    groups = worker([page("l0", tokens=4, nbytes=8)]).groups * 3
    a = page("a", tokens=4, nbytes=8, block_stride=64)
    b = page("b", tokens=4, nbytes=8, block_stride=64, address=32, group=1)
    c = page("c", tokens=4, nbytes=8, address=10_000, group=2)
    placement = bind_layout(worker([a, b, c], groups=groups)).placement
    assert placement.overlays == ((0, 1),)
    assert placement.blocks_of_group == (8, 8, 8)


def test_separate_tensors_overlay_nothing() -> None:
    layers = side_by_side([page("a", tokens=4, nbytes=8), page("b", tokens=4, nbytes=8, group=1)], base=64)
    groups = worker(layers[:1]).groups * 2
    assert bind_layout(worker(layers, groups=groups)).placement.overlays == ()
