"""Timers, coverage, stories and tables, each against something simpler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError, ProtocolReason, RemoteProtocolError
from kvferry.ids import TransferId
from kvferry.protocol import (
    ConsumerLimits,
    Entry,
    Fate,
    Outcome,
    PartDone,
    ProducerLimits,
    Span,
    Story,
    render_diagrams,
    render_tables,
)
from kvferry.protocol.coverage import MAX_RANGES, Coverage
from kvferry.protocol.tables import (
    FETCH_ENDED,
    FETCH_TABLE,
    LEASE_ENDED,
    LEASE_TABLE,
    PULL_TABLE,
    WRITE_TABLE,
    LeaseState,
    PullState,
    WriteState,
)
from kvferry.protocol.timers import Timers


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 30), st.booleans()), max_size=60),
    st.integers(0, 30),
)
def test_timers_are_a_dictionary_of_deadlines(steps: list[tuple[str, int | None, bool]], now: int) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, int] = {}
    for key, when, only_sooner in steps:
        if when is None:
            timers.cancel(key)
            model.pop(key, None)
        elif only_sooner:
            timers.hasten(key, when)
            if key in model:
                model[key] = min(model[key], when)
        else:
            timers.set(key, when)
            model[key] = when
        assert timers.next == min(model.values(), default=None)
        assert len(timers) == len(model)
    due = []
    while (key_due := timers.pop_due(now)) is not None:
        due.append(key_due)
    assert sorted(due) == sorted(key for key, when in model.items() if when <= now)
    assert [model[key] for key in due] == sorted(model[key] for key in due)


def test_a_timer_that_is_moved_for_ever_takes_no_more_room() -> None:
    timers: Timers[int] = Timers()
    for when in range(10_000):
        timers.set(when % 3, when)
    assert len(timers._heap) < 200


parts = st.builds(
    lambda start, length, epoch, groups: PartDone("r", start, min(start + length, 24), epoch, groups),
    st.integers(4, 24),
    st.integers(0, 12),
    st.integers(0, 2),
    st.none() | st.lists(st.integers(0, 1), max_size=2).map(tuple),
)


@given(st.lists(parts, max_size=20))
def test_coverage_is_a_set_of_positions(given_parts: list[PartDone]) -> None:
    coverage = Coverage(Span(4, 24), groups=2)
    model: dict[int, set[int]] = {0: set(), 1: set()}
    epoch = 0
    for part in given_parts:
        coverage.add(part)
        if part.epoch > epoch:
            epoch, model = part.epoch, {0: set(), 1: set()}
        if part.epoch == epoch:
            for group in (0, 1) if part.groups is None else part.groups:
                model[group] |= set(range(part.start, part.stop))
        assert coverage.complete == all(held == set(range(4, 24)) for held in model.values())


def test_an_empty_span_is_complete_once_it_was_spoken_of() -> None:
    coverage = Coverage(Span(7, 7), groups=1)
    assert not coverage.complete
    coverage.add(PartDone("r", 7, 7))
    assert coverage.complete


@pytest.mark.parametrize(
    "part", [PartDone("r", 3, 8), PartDone("r", 8, 25), PartDone("r", 9, 8), PartDone("r", 4, 8, 0, (2,))]
)
def test_parts_of_something_else_are_refused(part: PartDone) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Coverage(Span(4, 24), groups=2).add(part)
    assert caught.value.reason is ProtocolReason.MALFORMED


def test_coverage_is_bounded() -> None:
    coverage = Coverage(Span(0, 4 * MAX_RANGES), groups=1)
    for index in range(MAX_RANGES):
        coverage.add(PartDone("r", 2 * index, 2 * index + 1))
    with pytest.raises(RemoteProtocolError):
        coverage.add(PartDone("r", 2 * MAX_RANGES, 2 * MAX_RANGES + 1))


def test_stories_are_bounded_in_number_and_in_length() -> None:
    story = Story(transfers=2, entries=3)
    for name in "abc":
        for index in range(5):
            story.add(TransferId(name), Entry(float(index), f"e{index}", "s", ()))
    assert len(story) == 2
    assert story.of(TransferId("a")) == ()
    assert [entry.event for entry in story.of(TransferId("c"))] == ["e2", "e3", "e4"]


@pytest.mark.parametrize(
    ("table", "start", "ends"),
    [
        (LEASE_TABLE, LeaseState.AWAITED, LEASE_ENDED),
        (WRITE_TABLE, WriteState.WAITING, {WriteState.SERVED, WriteState.REFUSED}),
        (FETCH_TABLE, next(iter(FETCH_TABLE))[0], FETCH_ENDED),
        (PULL_TABLE, PullState.QUEUED, {PullState.SERVED, PullState.CLOSED}),
    ],
)
def test_every_state_is_reached_and_ends_and_nothing_follows_an_end(table: dict, start: object, ends: set) -> None:  # type: ignore[type-arg]
    states = {state for state, _ in table} | set(table.values())
    assert states == set(type(start))
    assert not any(state in ends for state, _ in table)
    reached = {start}
    while (more := reached | {after for (state, _), after in table.items() if state in reached}) != reached:
        reached = more
    assert reached == states
    ending = set(ends)
    while (more := ending | {state for (state, _), after in table.items() if after in ending}) != ending:
        ending = more
    assert ending == states


def test_tables_and_diagrams_show_every_transition() -> None:
    tables = (LEASE_TABLE, WRITE_TABLE, FETCH_TABLE, PULL_TABLE)
    for table, markdown, diagram in zip(tables, render_tables().values(), render_diagrams().values(), strict=True):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
        columns = {step: index for index, step in enumerate(rows[0])}
        cells = {row[0]: row for row in rows[2:]}
        arrows = diagram.splitlines()
        for (state, step), after in table.items():
            assert cells[state.value][columns[step.value]] == after.value
            names = state.value.replace("-", "_"), after.value.replace("-", "_")
            assert f"    {names[0]} --> {names[1]}: {step.value}" in arrows
        assert sum(bool(cell) for row in rows[2:] for cell in row[1:]) == len(table)


def test_values_that_contradict_themselves_cannot_be_made() -> None:
    for make in (
        lambda: Span(3, 2),
        lambda: Span(-1, 2),
        lambda: Outcome(Fate.DONE, ProtocolReason.EXPIRED),
        lambda: Outcome(Fate.FAILED),
        lambda: ProducerLimits(pulls=0),
        lambda: ConsumerLimits(silence=-1),
    ):
        with pytest.raises(LocalProtocolError):
            make()
