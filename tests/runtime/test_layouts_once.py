"""Layouts go by their fingerprints; one that a peer has lost is sent once more, and then never again."""

import pytest

from kvferry.ids import TransferId
from kvferry.layout import Placement, bind_layout, encode_placement
from kvferry.runtime.plans import Plans
from kvferry.runtime.stories import ask_stories
from kvferry.testing.fault_bench import FaultBench
from kvferry.testing.layouts import page, side_by_side, worker


def pulls_of(bench: FaultBench, transfer: str) -> int:
    """How often the consumer sent the pull of a transfer, by its own story."""
    answers = ask_stories(bench.debug, TransferId(transfer))
    events = [event for answer in answers if answer.side == "consumer" for event in answer.events]
    return sum(word.startswith("SendPull") for event in events for word in event.actions)


@pytest.mark.parametrize("lost_by", ["producer", "consumer"])
def test_a_lost_layout_is_asked_for_once(lost_by: str) -> None:
    """Two processes; one of them is started anew at its place, with its layout, and remembers nothing."""
    with FaultBench("cma", timing={"publish": 20.0, "pull": 20.0}) as bench:
        bench.move()
        bench.move()
        assert [pulls_of(bench, "good-1"), pulls_of(bench, "good-2")] == [2, 1]
        if lost_by == "producer":
            bench.producer.close()
            bench.producer = bench.start_producer()
        else:
            bench.consumer.close()
            bench.consumer = bench.start_consumer()
        bench.move()
        bench.move()
        # A consumer that comes back asks for the producer's; what it has told before is still known there.
        again = 2 if lost_by == "producer" else 1
        assert [pulls_of(bench, "good-3"), pulls_of(bench, "good-4")] == [again, 1]
        assert not bench.problems


def placement_of(blocks: int) -> Placement:
    component = page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=blocks)
    return bind_layout(worker(side_by_side([component], base=0))).placement


def test_so_many_layouts_of_peers_are_remembered_and_no_more() -> None:
    """Any number of peers may come by; what is forgotten is asked for again, and one's own is never forgotten."""
    own, peers = placement_of(7), [placement_of(8 + index) for index in range(10)]
    plans = Plans([own], layouts=3)
    for peer in peers:
        plans.learn(peer.fingerprint, encode_placement(peer))
    assert plans.missing([own.fingerprint]) == ()
    missing = plans.missing(peer.fingerprint for peer in peers)
    assert missing == tuple(peer.fingerprint for peer in peers[:7])
    plans.learn(peers[0].fingerprint, encode_placement(peers[0]))
    assert plans.missing([peers[0].fingerprint]) == ()
