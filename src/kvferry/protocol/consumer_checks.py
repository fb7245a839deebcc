"""What holds of a consumer's records between any two events; for tests."""

from collections.abc import Mapping

from kvferry.ids import Incarnation
from kvferry.protocol.consumer_fetches import Fetches
from kvferry.protocol.consumer_pulls import Pulls
from kvferry.protocol.consumer_records import FenceDue, Fetch, FetchDue, ProducerRecord, PullDue, TimerKey
from kvferry.protocol.invariants import holds
from kvferry.protocol.tables import FETCH_ENDED, PULL_MOVING, PullState
from kvferry.protocol.timers import Timers


def check_fetches(fetches: Fetches, pulls: Pulls, timers: Timers[TimerKey]) -> None:
    """All fetches, and what is counted of them."""
    for fetch in fetches.all():
        _check_fetch(fetch, pulls.producers, timers)
    tickets = {one.ticket: one.transfer for one in fetches.all() if one.ticket is not None}
    holds(fetches.tickets == tickets, "tickets name their fetches")
    over = sum(fetch.blocks for fetch in fetches.all() if fetch.state in FETCH_ENDED)
    holds(over == fetches.quarantined, "blocks in quarantine are counted")
    known = sum(1 + len(fetch.pulls) for fetch in fetches.all()) + len(pulls.producers)
    holds(len(timers) <= known, "no stray timer")


def _check_fetch(fetch: Fetch, producers: Mapping[Incarnation, ProducerRecord], timers: Timers[TimerKey]) -> None:
    states = {pull.state for pull in fetch.pulls.values()}
    ended = fetch.state in FETCH_ENDED
    holds(ended != (FetchDue(fetch.transfer) in timers), "a fetch that is not over has a deadline")
    holds(not ended or bool(states & PULL_MOVING), "a fetch that is over is kept only for its pulls")
    holds(not ended or not states & {PullState.OPEN, PullState.QUEUED}, "no pull goes on without its fetch")
    holds(ended or not states & {PullState.ENDING, PullState.IN_DOUBT, PullState.CLOSED}, "a failure is told")
    for pull in fetch.pulls.values():
        live = pull.state in (PullState.QUEUED, *PULL_MOVING)
        known = producers.get(pull.producer)
        holds(live == (known is not None and pull.key in known.pulls), "a live pull is its producer's")
        due = PullDue(pull.key) in timers
        holds(due or pull.state is not PullState.ENDING, "an ending pull has a deadline")


def check_producers(pulls: Pulls, timers: Timers[TimerKey]) -> None:
    """What is known of each life of a producer."""
    for incarnation, producer in pulls.producers.items():
        states = {pull.state for pull in pulls.of(producer)}
        holds(producer.fencing or bool(states), "a producer is kept for its pulls")
        holds(not producer.unproven or states <= {PullState.IN_DOUBT}, "nothing waits for a fence that fails")
        holds(not producer.fencing or states <= {PullState.IN_DOUBT, PullState.QUEUED}, "a fence settles all")
        holds(producer.fencing or PullState.QUEUED not in states, "pulls wait only for a fence")
        doubtful = PullState.IN_DOUBT in states
        holds(not doubtful or FenceDue(incarnation) in timers, "doubt has an end")
