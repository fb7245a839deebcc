"""The edges of placements, by value: what shares a storage and what does not, what is empty, what fits exactly."""

import pytest

from kvferry.errors import PlanError
from kvferry.layout import Binding, Component, Layout, Region, bind_layout, decode_placement, encode_placement
from kvferry.layout.placement import Placed, check_binding
from kvferry.layout.records import LIMIT
from kvferry.testing.layouts import at, page, worker


def tensors(*addresses: int) -> Layout:
    """A layer of 256 bytes in an allocation of its own at each address."""
    layers = [page(f"l{i}", tokens=4, nbytes=8, address=address) for i, address in enumerate(addresses)]
    return worker(layers, regions=[Region(address, 256) for address in addresses])


def test_without_regions_addresses_stay_as_they_are() -> None:
    layer = page("l0", tokens=4, nbytes=8)
    layout = worker([layer, page("l1", tokens=4, nbytes=8, address=1000)], regions=[])
    bound = bind_layout(layout)
    assert bound.placement.placed == tuple(Placed(0, component) for component in layout.components)
    assert (bound.placement.storages, bound.binding, bound.regions) == ((), Binding(()), ())


def test_memories_that_touch_do_not_share_a_storage() -> None:
    """The first component ends on the very byte at which the second memory, and its component, begin."""
    first, second = page("l0", tokens=4, nbytes=8, num_blocks=2), page("l1", tokens=4, nbytes=8, num_blocks=2)
    regions = [Region(0, 64, "cpu"), Region(64, 64, "cuda:0")]
    bound = bind_layout(worker([first, at(second, 64)], regions=regions))
    assert bound.binding == Binding((0, 64))
    assert [storage.memory for storage in bound.placement.storages] == ["cpu", "cuda:0"]
    assert bound.placement.placed == (Placed(0, first), Placed(1, second))


@pytest.mark.parametrize("spanning", [0, 1, 2, 3])
def test_whichever_component_spans_two_regions_binds_them(spanning: int) -> None:
    """Four of one block each in the first region; one of them has a second block in the second region."""
    layers = [page(f"l{i}", tokens=4, nbytes=8, num_blocks=1 + (i == spanning), block_stride=1000, address=i * 32)
              for i in range(4)]  # fmt: skip
    regions = [Region(0, 128), Region(1000, 128), Region(3000, 8)]
    bound = bind_layout(worker(layers, regions=regions))
    assert bound.binding == Binding((0, 3000))
    assert [p.storage for p in bound.placement.placed] == [0] * 4
    assert bound.regions == tuple(regions)


def test_overlays_of_two_places_are_joined_where_they_have_a_group_in_common() -> None:
    def pair(first: int, second: int, address: int) -> list[Component]:
        return [page(f"g{g}at{address}", tokens=4, nbytes=8, address=address, group=g) for g in (first, second)]

    groups = worker([page("l0", tokens=4, nbytes=8)]).groups * 5
    apart = worker([*pair(0, 1, 0), *pair(3, 2, 1000)], groups=groups)
    assert bind_layout(apart).placement.overlays == ((0, 1), (2, 3))
    chained = worker([*pair(0, 1, 0), *pair(3, 2, 1000), *pair(1, 2, 2000)], groups=groups)
    assert bind_layout(chained).placement.overlays == ((0, 1, 2, 3),)
    regions = [Region(0, 256), Region(1000, 256), Region(2000, 256)]
    storages = worker(chained.components, groups=groups, regions=regions)
    assert bind_layout(storages).placement.overlays == ((0, 1, 2, 3),)


def test_a_group_has_the_blocks_of_its_smallest_component() -> None:
    groups = worker([page("l0", tokens=4, nbytes=8)]).groups * 3
    layers = [page(f"l{i}", tokens=4, nbytes=8, num_blocks=blocks, group=group, address=address)
              for i, (blocks, group, address) in enumerate(((5, 0, 0), (3, 0, 1000), (7, 2, 2000)))]  # fmt: skip
    placement = bind_layout(worker(layers, groups=groups)).placement
    assert placement.blocks_of_group == (3, 0, 7)


def test_the_two_regions_that_overlap_are_named() -> None:
    placement = bind_layout(tensors(0, 1000, 2000)).placement
    for bases, said in (
        ((0, 5000, 5255), r"\[5000, 5256\] and \[5255, 5511\]"),
        ((5255, 0, 5000), r"\[5000, 5256\] and \[5255, 5511\]"),
        ((9000, 5255, 5000), r"\[5000, 5256\] and \[5255, 5511\]"),
    ):
        with pytest.raises(PlanError, match=f"the binding has regions {said}, which overlap"):
            check_binding(placement, Binding(bases))


@pytest.mark.parametrize("regions", [[Region(0, LIMIT)], [Region(0, 256), Region(257, LIMIT - 257)]])
def test_a_peers_placement_may_fill_all_there_is(regions: list[Region]) -> None:
    """Storages are laid out one byte apart from 0 on to be checked: not a byte is wasted."""
    layers = [page(f"l{i}", tokens=4, nbytes=8, address=region.address) for i, region in enumerate(regions)]
    placement = bind_layout(worker(layers, regions=regions)).placement
    assert len(placement.storages) == len(regions)
    assert decode_placement(encode_placement(placement)) == placement


def test_a_base_too_high_is_refused_before_anything_is_built_from_it() -> None:
    placement = bind_layout(tensors(0, 1000)).placement
    check_binding(placement, Binding((LIMIT - 256, 0)))
    for bases in ((LIMIT - 255, 0), (0, LIMIT)):
        with pytest.raises(PlanError, match="the binding has a region that reaches past"):
            check_binding(placement, Binding(bases))
