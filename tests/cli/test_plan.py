"""``kvferry plan`` as other programs call it: exit status, standard output, standard error."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.cli.main import spread_lists
from kvferry.layout import Layout, encode_layout
from kvferry.plan import BlockTable, TransferRequest, encode_request
from kvferry.testing.layouts import page, worker


@dataclass(frozen=True)
class Files:
    """One producer of four heads, two consumers of two."""

    folder: Path

    @property
    def arguments(self) -> list[str]:
        names = ("--producer", "P0.json", "--consumer", "D0.json", "D1.json", "--request", "R.json")
        return ["plan", *(n if n.startswith("--") else str(self.folder / n) for n in names)]

    def change(self, name: str, **fields: Any) -> None:
        path = self.folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    sides: dict[str, Layout] = {"P0.json": worker([page("l0", heads=(0, 4, 4), tokens=4, nbytes=8, address=4096)])}
    for rank in range(2):
        sides[f"D{rank}.json"] = worker([page("l0", heads=(2 * rank, 2, 4), tokens=4, nbytes=8, address=65_536)])
    for name, layout in sides.items():
        (tmp_path / name).write_bytes(encode_layout(layout))
    tables = (BlockTable.of([1, 2], first_token=0),), (BlockTable.of([5, 6], first_token=0),)
    (tmp_path / "R.json").write_bytes(encode_request(TransferRequest(0, 8, *tables)))
    return Files(tmp_path)


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return Answer(end.value.code, captured.out, captured.err)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The error object; status 2, nothing on standard output, one line on standard error."""
    answer = call(arguments, capsys)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    error: dict[str, str] = json.loads(answer.err)["error"]
    assert set(error) == {"reason", "message"}
    return error


def test_json_is_one_object_and_nothing_else(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call([*files.arguments, "--json"], capsys)
    assert (answer.status, answer.err) == (0, "")
    assert json.loads(answer.out) == {
        "format": "kvferry.plan/1",
        "transfers": [
            {"producer": 0, "consumer": 0, "descriptors": [[4224, 65_856, 64], [4352, 65_920, 64]]},
            {"producer": 0, "consumer": 1, "descriptors": [[4288, 65_856, 64], [4416, 65_920, 64]]},
        ],
        "stats": {"descriptors": 4, "bytes": 256},
    }


def test_table_for_people(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(files.arguments, capsys)
    assert answer.status == 0
    assert "4 descriptors, 256 bytes" in answer.out
    assert "D1.json" in answer.out


def test_nothing_to_move_says_so(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.change("R.json", tokens={"start": 8, "stop": 8})
    assert "nothing to move" in call(files.arguments, capsys).out
    empty = json.loads(call([*files.arguments, "--json"], capsys).out)
    assert (empty["transfers"], empty["stats"]) == ([], {"descriptors": 0, "bytes": 0})


@pytest.mark.parametrize("name", ["P0.json", "D1.json", "R.json"])
def test_an_unreadable_or_truncated_file_is_named(files: Files, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "invalid-request" if name == "R.json" else "invalid-layout"
    path = files.folder / name
    path.write_bytes(path.read_bytes()[:40])
    truncated = refusal([*files.arguments, "--json"], capsys)
    path.unlink()
    gone = refusal(files.arguments, capsys)
    for error in (truncated, gone):
        assert error["reason"] == reason
        assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "fields", "reason", "words"),
    [
        ("R.json", {"tokens": {"start": 4, "stop": 2}}, "invalid-request", "[4, 2)"),
        ("R.json", {"extra": 1}, "invalid-request", "`extra`"),
        ("R.json", {"producer": []}, "invalid-request", "0 tables, but the layouts have 1 groups"),
        ("R.json", {"consumer": [{"first_token": 0, "blocks": [5, 8]}]}, "invalid-request", "block id 8 is out of"),
        ("R.json", {"consumer": [{"first_token": 0, "blocks": [5, -1]}]}, "invalid-request", "$.consumer[0].blocks[1]"),
        ("R.json", {"consumer": [{"first_token": 0, "blocks": [5, 5]}]}, "duplicate-blocks", "block 5"),
        ("R.json", {"producer": [{"first_token": 0, "blocks": [1, None]}]}, "missing-positions", "position 4"),
        ("P0.json", {"regions": []}, "invalid-layout", "no regions"),
        ("P0.json", {"regions": [{"address": 4096, "nbytes": 1000}]}, "outside-region", "[4096, 5096)"),
        ("D1.json", {"groups": [{"kind": "attention", "block_tokens": 4, "chunk": 8}]}, "invalid-layout", "chunk=8"),
        ("P0.json", {"groups": [{"kind": "attention", "block_tokens": 8}]}, "invalid-layout", "= 4, but block_tokens"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_reason_and_values(
    files: Files, name: str, fields: dict[str, Any], reason: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files.change(name, **fields)
    error = refusal([*files.arguments, "--json"], capsys)
    assert error["reason"] == reason
    assert words in error["message"]


def test_limits_are_options(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal([*files.arguments, "--max-descriptors", "3"], capsys)
    assert error["reason"] == "limit-exceeded"
    assert "over the limit of 3" in error["message"]
    assert call([*files.arguments, "--max-descriptors", "4", "--json"], capsys).status == 0
    big = files.folder / "P0.json"
    big.write_bytes(big.read_bytes() + b" " * 1_100_000)
    assert refusal([*files.arguments, "--max-file-mb", "1"], capsys)["reason"] == "limit-exceeded"


def test_a_picture_and_a_single_descriptor_are_named(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    svg = files.folder / "plan.svg"
    answer = call([*files.arguments, "--svg", str(svg)], capsys)
    assert answer.out.startswith(f"wrote {svg}\n")
    assert "4 descriptors, " in answer.out
    files.change("R.json", tokens={"start": 0, "stop": 0})
    assert "0 descriptors, 0 bytes" in call(files.arguments, capsys).out


def test_lists_and_repeated_options_are_the_same() -> None:
    assert spread_lists(["plan", "--consumer", "a", "b", "--json"]) == [
        "plan", "--consumer", "a", "--consumer", "b", "--json"]  # fmt: skip
    assert spread_lists(["plan", "--consumer=a", "b", "--request", "r", "s"]) == [
        "plan", "--consumer=a", "--consumer", "b", "--request", "r", "s"]  # fmt: skip


def test_as_a_process(files: Files) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *files.arguments, "--json"], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["stats"]["descriptors"] == 4


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_no_input(files: Files, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal([*files.arguments, "--request", device, "--json"], capsys)
    assert error["reason"] == "invalid-request"
    assert f"{device} is neither a file nor a pipe" in error["message"]


def test_a_named_pipe_that_nobody_writes_to_is_not_waited_for(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(files.folder / "pipe")
    assert refusal([*files.arguments, "--request", str(files.folder / "pipe")], capsys)["reason"] == "invalid-request"


def test_a_pipe_may_be_slow_but_not_endless(files: Files) -> None:
    arguments = [*files.arguments, "--request", "/dev/stdin", "--json"]
    command = [sys.executable, "-m", "kvferry.cli", *arguments]
    request = (files.folder / "R.json").read_bytes()
    for data, status in ((request, 0), (request + b" " * 1_000_001, 2)):
        done = subprocess.run([*command, "--max-file-mb", "1"], input=data, capture_output=True, timeout=60)
        assert done.returncode == status
    assert json.loads(done.stderr)["error"]["reason"] == "limit-exceeded"


def test_a_file_whose_name_is_no_text(files: Files) -> None:
    odd = os.fsencode(files.folder) + b"/\xff.json"
    os.link(files.folder / "P0.json", odd)
    arguments = [
        "plan",
        "--producer",
        odd,
        "--consumer",
        files.folder / "D0.json",
        "--request",
        files.folder / "R.json",
    ]
    picture = files.folder / "plan.svg"
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *arguments, "--svg", picture],
        env={**os.environ, "COLUMNS": "190"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert b"0: \\udcff.json" in done.stdout
    assert b"from producer 0: ?.json" in picture.read_bytes()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("ending", ["> /dev/full", "| true", ">&-", "2>&-"])
def test_output_that_goes_nowhere_is_no_traceback(files: Files, ending: str, unbuffered: str) -> None:
    command = shlex.join([sys.executable, "-m", "kvferry.cli", *files.arguments, "--json"])
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", f"{command} {ending}"], env=environment, capture_output=True, timeout=60)
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr
    assert done.returncode == (1 if "full" in ending else 0)


def test_import_is_quick_and_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import kvferry; d = time.perf_counter() - t; "
        "heavy = {'torch', 'vllm', 'mooncake', 'numpy'} & set(sys.modules); print(d, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True)
    seconds, heavy = done.stdout.split(maxsplit=1)
    assert float(seconds) < 0.5
    assert heavy.strip() == "[]"
