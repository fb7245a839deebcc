"""The command as an operator runs it: a process of its own, stopped by a signal."""

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from kvferry.testing.openai_engine import BootstrapPeer, OpenAiEngine, wait_until
from kvferry.testing.ports import free_port

COMMAND = "import typer; from kvferry.cli.serve_router import serve_router; typer.run(serve_router)"


@pytest.fixture
def peers():
    peers = [OpenAiEngine(), OpenAiEngine(), BootstrapPeer("P")]
    yield peers
    for peer in peers:
        peer.begin_stop()
    for peer in peers:
        peer.stop()


def is_up(url):
    try:
        return httpx.get(url + "/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_the_command_serves_until_it_is_told_to_stop(peers):
    prefill, decode, bootstrap = peers
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--prefill", f"{prefill.url},{bootstrap.port}", "--decode", decode.url, "--port", str(port)]
    with subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: is_up(url), what="the router listens")
            answer = httpx.post(url + "/v1/completions", json={"prompt": "a"}, trust_env=False)
            assert json.loads(answer.text)["choices"][0]["text"].startswith("a/")
        finally:
            process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    lines = [line for line in log.splitlines() if "path=/v1/completions" in line]
    assert len(lines) == 1
    assert "pieces=1 status=200" in lines[0]
    assert decode.received[0].body["kv_transfer_params"]["remote_engine_id"] == "P"


def test_a_bootstrap_service_may_take_as_long_as_an_engine_may(peers):
    """What listens is slow to answer on a machine with too much to do, its bootstrap service as any other."""
    prefill, decode, bootstrap = peers
    bootstrap.pause = 2.5
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--prefill", f"{prefill.url},{bootstrap.port}", "--decode", decode.url, "--port", str(port)]
    arguments += ["--connect-timeout", "20"]
    with subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: is_up(url), what="the router listens")
            answer = httpx.post(url + "/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=30)
        finally:
            process.send_signal(signal.SIGTERM)
    assert answer.status_code == 200
    assert decode.received[0].body["kv_transfer_params"]["remote_engine_id"] == "P"


def run_for(arguments):
    engines = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *engines, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_taken_port_is_one_line_with_its_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_for(["--port", str(port)])
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [
        f"kvferry serve-router: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port, "
        "or stop what listens there"
    ]


def test_an_address_of_another_machine_is_one_line():
    ended = run_for(["--host", "192.0.2.1"])
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "cannot listen on 192.0.2.1 port 8000" in ended.stderr
    assert ended.stderr.endswith("check --host and --port\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--bootstrap-ca", "/nowhere.pem"], "'/nowhere.pem' cannot be used"), (["--host", "a..b"], "is no host name")],
)
def test_options_that_cannot_be_meant_are_one_line_and_status_2(arguments, said):
    ended = run_for(arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr
