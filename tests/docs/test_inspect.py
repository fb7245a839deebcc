"""The page about looking at layouts: its pictures and its answers are what the commands give today."""

import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.testing.commands import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "inspect.md").read_text()
PICTURES = ROOT / "docs" / "pictures"

ANSWERED = re.findall(r"```console\n\$ kvferry ([^\n]*)\n```\n\n```text\n(.*?)\n```", PAGE, flags=re.DOTALL)
DRAWN = re.findall(r"```console\n\$ kvferry (.*?)\n```\n\n!\[.*?\]\(pictures/(.*?)\)", PAGE)


def script() -> ModuleType:
    spec = spec_from_file_location("make_pictures", ROOT / "scripts" / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs and the pictures as they are made now."""
    folder = tmp_path_factory.mktemp("pictures")
    script().main(["--pictures", str(folder), "--layouts", str(folder)])
    return folder


def test_the_pictures_are_up_to_date(made: Path) -> None:
    drawn = {path.name: path.read_text() for path in made.glob("*.svg")}
    assert len(drawn) >= 3
    assert drawn == {path.name: path.read_text() for path in PICTURES.glob("*.svg")}, "run scripts/make_pictures.py"


def test_the_page_shows_every_picture_with_its_command() -> None:
    assert {name for _, name in DRAWN} == {path.name for path in PICTURES.glob("*.svg")}
    assert {name: tuple(shlex.split(words)) for words, name in DRAWN} == script().COMMANDS


@pytest.mark.parametrize(("words", "text"), ANSWERED, ids=[words.split()[0] for words, _ in ANSWERED])
def test_the_answers_are_those_of_the_commands(
    words: str, text: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    answer = call(shlex.split(words))
    assert answer.status == 0
    assert [line.rstrip() for line in answer.out.rstrip().split("\n")] == text.split("\n")


def test_the_page_has_an_answer_of_each_kind() -> None:
    assert [words.split()[0] for words, _ in ANSWERED] == ["inspect", "check", "explain"]
