"""The report file: one line for each pair, and no transfer that waits for a disk."""

import logging

import pytest

from kvferry.protocol import DONE, Span, Table
from kvferry.runtime.report import Report
from kvferry.testing.layouts import page, worker

from .loopback import fetch, join, next_end, publication

TABLES = (Table(0, (3, 4, 9)),)


def test_a_full_disk_costs_lines_and_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    report = Report("/dev/full")
    pair = join([layout], layout, report=report)
    try:
        pair.call(pair.producers[0].publish, publication(1, "t1", 40, *TABLES))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *TABLES))
        assert next_end(pair).outcome == DONE
        assert (pair.consumer.quiet.get(timeout=5), pair.producers[0].quiet.get(timeout=5)) == (11, 1)
    finally:
        pair.close()
        report.close()
    said = [one.message for one in caplog.records if one.levelno == logging.ERROR]
    assert len(said) == 1
    assert "the transfer report cannot be written" in said[0]
