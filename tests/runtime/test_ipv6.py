"""Both runtimes over ``::1``: pages arrive, whichever address the producer's ranks register at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.runtime.checkup import local_addresses
from kvferry.testing.ports import free_port

CHILD = Path(__file__).parent / "both_at.py"


@pytest.mark.parametrize("register_host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("transport", ["cma", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def test_pages_arrive(transport: str, register_host: str) -> None:
    if "::1" not in {one.ip for one in local_addresses()}:
        pytest.skip("no IPv6 here")
    words = [sys.executable, str(CHILD), transport, "::1", register_host, str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["outcomes"], said["equal"]) == (["done"], True), done.stderr
    assert said["messages"].startswith("tcp://[::1]:")
