"""Commands in the pages for operators can be given as they stand: subcommands, options and JSON are real ones."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvferry.cli.doctor import SERVE_PORT
from kvferry.cli.main import COMMANDS, make_app
from kvferry.runtime import Timing
from kvferry.runtime.checkup.deployment import DEFAULT_BOOTSTRAP_PORT
from kvferry.transport.engine_settings import FIRST_PORT, LAST_PORT
from kvferry.vllm.config import Config, parse_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("deployment", "deployment.zh-CN", "migration", "doctor", "routers")),
]
FENCED = re.compile(r"```(?:console|diff|)\n(.*?)```", flags=re.DOTALL)
CONNECTOR = re.compile(r"'(\{\"kv_connector\".*?\})'", flags=re.DOTALL)
PROMPT = re.compile(r"^(?:[a-z]*\$ )?kvferry (.*)$")


def fences(page: Path) -> str:
    """The fenced blocks, with lines that end in a backslash joined to the next."""
    return re.sub(r"\\\n\s*", "", "\n".join(FENCED.findall(page.read_text(encoding="utf-8"))))


def commands(page: Path) -> Iterator[list[str]]:
    for line in fences(page).splitlines():
        found = PROMPT.match(line)
        if found is not None:
            yield shlex.split(found[1], comments=True)


def option_names(words: list[str]) -> set[str]:
    """All options of the subcommand that ``words`` begin with."""
    group: Any = typer.main.get_command(make_app(words[0]))
    command = group.commands[words[0]]
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = []
    for words in commands(page):
        if words[0] not in {*COMMANDS, "version"} and words[0] != "--help":
            wrong.append(words)
            continue
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        wrong += [[words[0], name] for name in sorted(given - option_names(words))]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_connector_configuration_is_taken(page: Path) -> None:
    for text in CONNECTOR.findall(fences(page)):
        found = json.loads(text)
        if found["kv_connector"] == "FerryConnector":
            parse_config(found.get("kv_connector_extra_config", {}))
            assert found["kv_connector_module_path"] == "kvferry.vllm"
            assert found["kv_role"] in {"kv_producer", "kv_consumer", "kv_both"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_doctor_configuration_is_taken(page: Path) -> None:
    for words in commands(page):
        if "--config" in words:
            parse_config(json.loads(words[words.index("--config") + 1]))


def test_the_pages_have_such_commands_at_all() -> None:
    counts = {page.name: len([*commands(page)]) for page in PAGES}
    assert min(counts["README.md"], counts["README.zh-CN.md"], counts["deployment.md"]) >= 5, counts
    assert counts["deployment.md"] == counts["deployment.zh-CN.md"]
    configurations = {page.name: len(CONNECTOR.findall(fences(page))) for page in PAGES}
    assert configurations["deployment.md"] == configurations["deployment.zh-CN.md"] == 6


def test_the_migration_pages_options_of_vllms_connector_are_known_here() -> None:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    table = text.split("### Option by option")[1].split("###")[0]
    names = set(re.findall(r"^\| `([a-z_]+)` \(", table, flags=re.MULTILINE))
    assert {"mooncake_protocol", "device_name", "num_workers"} <= names
    values: dict[str, Any] = {"num_workers": 10, "mooncake_protocol": "rdma", "device_name": ""}
    parse_config({name: values[name] for name in names})


@pytest.mark.parametrize("name", ["deployment.md", "deployment.zh-CN.md"])
def test_the_deployment_pages_numbers_are_those_of_the_source(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    config, timing = Config(), Timing()
    assert f"{FIRST_PORT}-{LAST_PORT}" in text
    for option, seconds in [
        ("silence_timeout", config.silence_timeout),
        ("publish_timeout", config.publish_timeout),
        ("pull_timeout", config.pull_timeout),
        ("orphan_timeout", config.orphan_timeout),
        ("write_timeout", config.write_timeout),
        ("lost_consumer_grace", config.lost_consumer_grace),
    ]:
        assert re.search(rf"^\|[^|]+\| {seconds:g} \S+ \| `{option}` \|$", text, flags=re.MULTILINE), option
    assert re.search(rf"^\|[^|]+\| {timing.resolve:g} \S+ \| \|$", text, flags=re.MULTILINE)
    assert f"| {SERVE_PORT} TCP |" in text
    assert f"| {DEFAULT_BOOTSTRAP_PORT} TCP |" in text
