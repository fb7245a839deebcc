"""What a worker remembers of layouts and plans: each made once, and none for an engine that nobody has."""

import pytest

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import bind_layout
from kvferry.runtime.plans import MAX_RANKS, Plans
from kvferry.testing.layouts import page, worker


@pytest.mark.parametrize("producing", [True, False])
def test_an_engine_of_more_ranks_than_anybody_has_is_refused_before_it_is_planned(producing: bool) -> None:
    ours = bind_layout(worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])).placement
    plans = Plans([ours])
    crowd = [str(ours.fingerprint)] * (MAX_RANKS + 1)
    sides = (crowd, crowd[:1]) if producing else (crowd[:1], crowd)
    with pytest.raises(RemoteProtocolError, match="1025 ranks") as refused:
        plans.between(*sides)
    assert refused.value.reason is ProtocolReason.LIMIT_EXCEEDED
    assert plans.known(*sides) is None


def test_a_plan_is_made_once() -> None:
    ours = bind_layout(worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])).placement
    plans = Plans([ours])
    name = [str(ours.fingerprint)]
    assert plans.between(name, name) is plans.between(name, name) is plans.known(name, name)
