"""A few of the faults of ``make faults``, and that the catalogue is what its page says."""

import pytest

from kvferry.testing.faults import Fault, catalogue, run_fault
from kvferry.testing.faults.catalogue import unavailable

CHOSEN = (
    "producer_killed:cma:during the write",
    "producer_stopped:cma:during the write",
    "consumer_killed:cma:during the write",
    "consumer_killed:cma:just before publication",
    "producer_stopped_for_good:cma:quarantine full",
    "other_version:cma:consumer, minor",
    "other_version:cma:producer, major",
    "other_version:cma:consumer, major",
    "producer_restarts:mooncake:with another layout",
    "misbehaves:cma:hangs",
    "misbehaves:mooncake:lies",
    "misbehaves_in_a_crowd:cma:crowd",
    "bad_weather:cma:late",
    "relay_cut:mooncake:during the write",
    "same_name_twice:cma:fetched twice",
)


def chosen() -> list[object]:
    named = {fault.name: fault for fault in catalogue()}
    marks = {"mooncake": (pytest.mark.mooncake,)}
    return [pytest.param(named[one], id=one, marks=marks.get(named[one].transport, ())) for one in CHOSEN]


@pytest.mark.parametrize("fault", chosen())
def test_a_fault_costs_no_byte_no_block_and_no_resource(fault: Fault) -> None:
    reason = unavailable(fault)
    if reason is not None:
        pytest.skip(reason)
    row = run_fault(fault)
    assert row.good, row
    assert row.noticed is None or row.noticed < 20, row


def test_there_are_enough_faults_and_none_has_the_name_of_another() -> None:
    names = [fault.name for fault in catalogue()]
    assert len(names) == len(set(names))
    assert len(names) >= 40
