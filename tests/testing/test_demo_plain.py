"""The demo without vLLM is a test: two processes, every byte, requests that begin at once."""

import io
import re

import pytest
from rich.console import Console

from kvferry.testing.demo_plain import run_plain_demo


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        ("cma", "hybrid"),
        ("cma", "window"),
        pytest.param("mooncake", "hybrid", marks=pytest.mark.mooncake),
        pytest.param("mooncake", "latent", marks=pytest.mark.mooncake),
    ],
)
def test_every_byte_of_a_scenario(transport: str, name: str) -> None:
    out = io.StringIO()
    status = run_plain_demo(names=[name], transport=transport, console=Console(file=out, width=120))
    assert status == 0, out.getvalue()
    last = out.getvalue().strip().splitlines()[-1]
    assert re.fullmatch(r"demo: 4/4 requests equal, 4 transfers, \d+ bytes, 0 mismatches", last)
