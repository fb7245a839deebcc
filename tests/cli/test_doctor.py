"""``kvferry doctor`` as people run it: exit status, JSON, a named peer."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.runtime.checkup import local_addresses
from kvferry.testing.ports import free_port

pytestmark = pytest.mark.mooncake

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "MC_"))}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
WORDS = (sys.executable, "-m", "kvferry.cli", "doctor")


def doctor(*words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*WORDS, *words], capture_output=True, text=True, timeout=120, env=CLEAN | (env or {}), check=False
    )


def config(**options: Any) -> str:
    return json.dumps({"bootstrap_port": free_port(), **options})


def found(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_sound_machine_is_zero_and_pages_went_through_both_transports(host: str) -> None:
    if host not in {one.ip for one in local_addresses()}:
        pytest.skip("no IPv6 here")
    done = doctor("--config", config(), "--host", host, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["sound"] is True
    assert said["choices"]["address"] == {"value": host, "why": "option host"}
    assert said["choices"]["transport"] == {"value": "mooncake", "why": "default"}
    served, families = ("[::]", "IPv6 and IPv4") if host == "::1" else ("0.0.0.0", "IPv4")
    where = f", served by rank 0 on {served}, every interface in {families}"
    assert said["choices"]["bootstrap"]["value"].endswith(where)
    pages = found(done)
    assert f"{served}:" in pages["bootstrap port"]["said"]
    assert pages["marker page over mooncake"]["facts"]["protocol"] == "tcp"
    assert pages["marker page over cma"]["facts"]["protocol"] == "process_vm_writev"
    engine = pages["mooncake engine"]
    assert (engine["facts"]["rows"], engine["facts"]["row_bytes"]) == (1000, 1 << 20)
    assert ("built for CPU memory alone" in engine["said"]) == (engine["facts"]["built_with"] == [])
    assert pages["mooncake version"]["facts"]["version"].startswith("mooncake-transfer-engine")
    assert done.stderr == ""
    explained = PAGE.read_text()
    missing = [name for name in (*pages, *said["choices"]) if f"`{name}`" not in explained]
    assert not missing, "docs/doctor.md names every choice and finding"


def test_the_last_line_counts_what_was_warned_of() -> None:
    options = ("--config", config(transport="cma"), "--host", "127.0.0.1")
    warnings = [one["verdict"] for one in json.loads(doctor(*options, "--json").stdout)["findings"]].count("warning")
    said = doctor(*options).stdout.splitlines()[-1]
    counted = f"nothing failed; {warnings} warning{'s'[: warnings != 1]}"
    assert said == (counted if warnings else "all that was looked at works")


def test_the_engines_settings_reach_the_engine() -> None:
    first = free_port()
    ports = [f"MC_MIN_RPC_PORT={first}", f"MC_MAX_RPC_PORT={first + 20}"]
    done = doctor("--config", config(mooncake_env=ports), "--host", "127.0.0.1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"starts on 127\.0\.0\.1:(\d+)", found(done)["mooncake engine"]["said"])
    assert told is not None
    assert first <= int(told[1]) <= first + 20
    assert doctor("--config", config(mooncake_env=["MC_FORCE_TCP=1"])).returncode == 2


def test_what_cannot_work_is_one_and_named() -> None:
    done = doctor("--config", config(mooncake_protocol="rdma"), "--host", "127.0.0.1", "--json")
    assert done.returncode == 1
    assert found(done)["mooncake engine"]["facts"] == {"reason": "wrong-protocol"}
    assert found(done)["marker page over mooncake"]["verdict"] == "skipped"
    assert found(done)["marker page over cma"]["verdict"] == "ok"


def test_a_port_that_is_taken_and_a_host_that_is_not_ours_are_one() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        done = doctor("--config", config(transport="cma", bootstrap_port=port), "--host", "127.0.0.1")
    assert done.returncode == 1
    assert "not sound" in done.stdout
    done = doctor("--host", "198.51.100.7", "--json")
    assert done.returncode == 1
    assert "no address of this machine" in found(done)["address"]["said"]


@pytest.mark.parametrize(
    "words", [("--config", '{"hosst": "a"}'), ("--config", "{"), ("--config", "[]"), ("--peer", "nowhere")]
)
def test_options_that_are_refused_are_two(words: tuple[str, ...]) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.fixture
def serving() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    words = [*WORDS, "--serve", "--serve-port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=CLEAN) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        yield first.split("waiting on ")[1].split(" ")[0], server
        server.terminate()


@pytest.mark.parametrize("transport", ["mooncake", "cma"])
def test_a_page_to_a_named_peer(serving: tuple[str, "subprocess.Popen[str]"], transport: str) -> None:
    address, server = serving
    done = doctor("--config", config(transport=transport), "--host", "127.0.0.1", "--peer", address, "--json")
    page = found(done)[f"marker page to {address}"]
    assert (done.returncode, page["verdict"], page["facts"]["transport"]) == (0, "ok", transport), done.stdout
    assert server.stdout is not None
    assert "equal at both ends" in server.stdout.readline()


def test_a_peer_that_is_not_there_is_one() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = doctor("--config", config(transport="cma"), "--host", "127.0.0.1", "--peer", address, "--json")
    assert done.returncode == 1
    assert found(done)[f"marker page to {address}"]["facts"] == {"reason": "peer-unreachable"}


def test_an_engine_under_vllms_own_connector_that_does_not_tell_is_one() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    words = ("--config", config(transport="cma", upstream_peer={"block_size": 32}), "--host", "127.0.0.1")
    done = doctor(*words, "--upstream-peer", url, "--json")
    assert done.returncode == 1
    told = found(done)[f"upstream peer at {url}"]
    assert (told["verdict"], told["facts"]) == ("failed", {"reason": "peer-lost"})
