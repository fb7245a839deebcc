"""The debug door: both sides of a real pair tell the life of a transfer, to nobody else, and leave nothing behind."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.ids import TransferId
from kvferry.runtime import ConsumerRuntime
from kvferry.runtime.stories import MAX_CLIENTS, ask_stories
from kvferry.testing.fault_bench import VICTIM, FaultBench, wait_until

from .worlds import World, local_side, options_for


@pytest.fixture
def bench() -> Iterator[FaultBench]:
    with FaultBench("cma") as one:
        yield one


def story(bench: FaultBench, transfer: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.cli", "story", transfer, "--dir", bench.debug]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_both_sides(bench: FaultBench) -> None:
    bench.move()
    done = story(bench, "good-1")
    assert done.returncode == 0, done.stderr
    producer, consumer = done.stdout.split("\n\n")
    assert re.match(r"producer rank 0 of p@[0-9a-f]{8}, from \d+\.\d s ago\n", producer)
    assert re.match(r"consumer rank 0 of d@[0-9a-f]{8}, from \d+\.\d s ago\n", consumer)
    for words in ("PullArrived", "StartWrite", "WriteDone", "ended done"):
        assert words in producer
    for words in ("FetchRequested", "SendPull 0", "ended done", "DestinationReleased"):
        assert words in consumer


def test_what_is_open_is_told_until_it_is_over(bench: FaultBench) -> None:
    assert still_open(bench) == {"producer": (), "consumer": ()}
    bench.fetch()
    assert wait_until(lambda: still_open(bench) == {"producer": (VICTIM,), "consumer": (VICTIM,)}, seconds=10)
    bench.publish()
    assert wait_until(lambda: still_open(bench) == {"producer": (), "consumer": ()}, seconds=10)


def still_open(bench: FaultBench) -> dict[str, tuple[str, ...]]:
    return {one.side: one.open for one in ask_stories(bench.debug, None)}


def test_an_unknown_transfer_is_said_to_be_unknown(bench: FaultBench) -> None:
    done = story(bench, "nobody-knows")
    assert (done.returncode, done.stdout) == (1, "")
    assert "2 runtimes were asked" in done.stderr


def test_a_client_that_hangs_does_not_keep_others_out_for_long(bench: FaultBench) -> None:
    bench.move()
    doors = list(Path(bench.debug).iterdir())
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(doors[0]))
            client.sendall(b"no end of line")
        assert wait_until(lambda: answering(bench) == 2, seconds=5)


def answering(bench: FaultBench) -> int:
    return sum(bool(one.events) for one in ask_stories(bench.debug, TransferId("good-1")))


def test_a_killed_process_leaves_a_socket_that_the_next_one_takes_away(bench: FaultBench) -> None:
    left = {path.name for path in Path(bench.debug).glob("producer-*")}
    bench.producer.kill()
    assert {path.name for path in Path(bench.debug).glob("producer-*")} == left
    bench.producer = bench.start_producer()
    now = {path.name for path in Path(bench.debug).glob("producer-*")}
    assert len(now) == 1
    assert not now & left
    bench.producer.close()
    assert not list(Path(bench.debug).glob("producer-*"))


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    options = options_for("cma", debug_dir=str(open_to_all))
    with pytest.raises(ConfigError, match="mode 0755") as refused:
        ConsumerRuntime(local_side(World.build("small"), engine="d", epoch="e"), options)
    assert refused.value.reason is ConfigReason.INVALID_VALUE
    assert not list(open_to_all.iterdir())


def test_the_directory_is_made_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    runtime = ConsumerRuntime(
        local_side(World.build("small"), engine="d", epoch="e"), options_for("cma", debug_dir=str(folder))
    )
    try:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert len(list(folder.iterdir())) == 1
    finally:
        runtime.close()
    assert not list(folder.iterdir())
