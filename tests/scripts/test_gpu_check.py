"""``scripts/gpu_check.py`` never claims what it did not look at."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"
LINE = re.compile(r"^(ok|skipped|failed) +([^:]+): (.+)$")


def run(*words: str) -> "tuple[int, dict[str, tuple[str, str]], str]":
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=480, env=environment, check=False
    )
    *lines, last = done.stdout.splitlines()
    found = [LINE.match(line) for line in lines]
    return done.returncode, {one[2]: (one[1], one[3]) for one in found if one is not None}, last


def test_without_a_gpu_every_step_says_that_it_was_skipped_and_nothing_failed() -> None:
    status, steps, last = run()
    assert status == 0
    assert {verdict for verdict, _ in steps.values()} == {"skipped"}
    assert {said for _, said in steps.values()} == {"no GPU is visible to torch here; not run"}
    assert last.startswith(f"gpu check on no GPU: 0 ok, {len(steps)} skipped, 0 failed, took ")
    assert {"layout of device tensors", "event before the first byte", "device of the threads"} <= set(steps)
    assert {"digests on the device", "mooncake tcp", "mooncake rdma"} <= set(steps)
    assert [name for name in steps if "copy" in name] == ["copy within the device (torch's, kvferry has no such path)"]


@pytest.mark.mooncake
@pytest.mark.vllm
def test_its_steps_work_on_memory_of_the_cpu() -> None:
    pytest.importorskip("torch")
    status, steps, last = run("--rehearse")
    assert status == 0, steps
    assert steps["layout of device tensors"][0] == steps["mooncake tcp"][0] == "ok"
    assert "equal at both ends" in steps["mooncake tcp"][1]
    assert steps["digests on the device"][0] == "ok"
    assert "3 kinds of digest equal to the host's, a changed byte shows" in steps["digests on the device"][1]
    assert steps["device of the threads"] == ("skipped", "memory of the CPU has no current device; not run")
    assert last.startswith("gpu check on cpu: ")
