"""A short run of the wire's fuzzer, and proof that it notices what it is there to notice."""

import os
import random
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.errors import FerryError
from kvferry.testing import fuzz_targets, fuzz_wire
from kvferry.testing.fuzz_targets import Target, targets
from kvferry.testing.fuzz_wire import Report, fuzz, input_of, try_input, words
from kvferry.testing.mutations import bad_message

GOOD_BUT_REFUSED = {"note", "reply", "address"}
"""Readers of which some good message is one that this side answers with a refusal."""


@pytest.mark.parametrize("target", targets(), ids=lambda one: one.name)
def test_good_messages_are_taken(target: Target) -> None:
    """Else the mutations would all end at the first check."""
    for good in target.good:
        try:
            target.read(good)
        except FerryError:
            assert target.name in GOOD_BUT_REFUSED


def test_good_pulls_get_as_far_as_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    real = fuzz_targets.check_descriptors
    monkeypatch.setattr(
        fuzz_targets, "check_descriptors", lambda rows, *rest: (counts.append(rows.count), real(rows, *rest))
    )
    for target in targets():
        if target.name in ("pull", "upstream pull"):
            target.read(target.good[0])
    assert len(counts) == 2
    assert min(counts) > 0


def test_a_short_run_finds_nothing() -> None:
    report = fuzz(range(6_000))
    assert report.findings == []
    assert report.count == 6_000
    assert set(report.taken) | {name.partition(":")[0] for name in report.refused} == {one.name for one in targets()}


def test_inputs_follow_from_their_seed() -> None:
    assert [input_of(seed)[1] for seed in range(300)] == [input_of(seed)[1] for seed in range(300)]
    assert len({input_of(seed)[1] for seed in range(300)}) > 250


def broken(monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], object]) -> None:
    one = Target("broken", read, (b"\x80",))
    monkeypatch.setattr(fuzz_wire, "targets", lambda: (one,))


def test_an_error_of_another_kind_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda data: {}[data])
    report = Report()
    try_input(1, report)
    assert report.findings[0].what.startswith("raised KeyError")
    assert "seed 1, broken" in words(report, start=0, seconds=1)


def test_a_slow_reader_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(_: bytes) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    broken(monkeypatch, spin)
    monkeypatch.setattr(fuzz_wire, "SECONDS", 0.02)
    report = Report()
    try_input(1, report)
    assert report.findings[0].what.startswith("took 0.0")


def test_a_greedy_reader_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda _: np.ones(80 << 20, np.uint8))
    report = Report()
    try_input(0, report)
    assert "took 80 MiB" in report.findings[0].what


def test_memory_beyond_the_limit_is_a_finding_of_any_input(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda _: bytearray(2 << 30))
    report = fuzz(range(1, 3))
    assert [finding.what[:18] for finding in report.findings] == ["raised MemoryError"] * 2


def test_a_reader_that_takes_the_process_down_is_a_finding_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: bytes) -> None:
        if os.getpid() != parent and fuzz_wire_seed() == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    parent = os.getpid()
    seen: list[int] = []
    real = fuzz_wire.input_of

    def noted(seed: int) -> tuple[Target, bytes]:
        seen.append(seed)
        return real(seed)

    def fuzz_wire_seed() -> int:
        return seen[-1]

    broken(monkeypatch, die)
    monkeypatch.setattr(fuzz_wire, "input_of", noted)
    report = fuzz(range(6))
    assert report.count == 6
    assert [(finding.seed, finding.what[:15]) for finding in report.findings] == [(3, "took the proces")]


def test_a_reader_that_hangs_is_a_finding_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(data: bytes) -> None:
        if data == input_of(2)[1] and os.getpid() != parent:
            time.sleep(600)

    parent = os.getpid()
    broken(monkeypatch, hang)
    monkeypatch.setattr(fuzz_wire, "HANG", 2.0)
    report = fuzz(range(4))
    assert report.count == 4
    assert report.findings[0].seed == 2
    assert "did not come back" in report.findings[0].what


@pytest.mark.parametrize("form", ["msgpack", "json", "text"])
def test_most_mutations_change_the_message(form: str) -> None:
    good = {"msgpack": b"\x82\xa1a\x01\xa1b\x93\x01\x02\x03", "json": b'{"a":1,"b":[1,2,3]}', "text": b"1 2 3"}[form]
    made = [bad_message(good, random.Random(seed), form=form) for seed in range(500)]  # type: ignore[arg-type]
    assert sum(one != good for one in made) > 400
    assert len(set(made)) > 200
