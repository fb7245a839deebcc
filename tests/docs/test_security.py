"""The security page names every option that it is about, and its numbers are those of the source."""

import re
from dataclasses import fields
from pathlib import Path

from kvferry.control import bootstrap, bootstrap_client, directory, secret, signing
from kvferry.control.sockets import SocketOptions
from kvferry.protocol.codec import MAX_MESSAGE_BYTES
from kvferry.runtime import plans
from kvferry.testing import fuzz_wire
from kvferry.vllm.config import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "security.md").read_text()


def test_the_options_are_on_the_page_and_exist() -> None:
    about = {"secret_file", "bootstrap_tls_cert", "bootstrap_tls_key", "bootstrap_ca", "write_targets"}
    about |= {"upstream_peers", "require_private_network"}
    assert about <= {one.name for one in fields(Config)}
    assert about <= set(re.findall(r"`([a-z_]+)[`:]", PAGE))


def test_the_numbers_are_those_of_the_source() -> None:
    sockets = SocketOptions()
    assert f"{MAX_MESSAGE_BYTES >> 20} MiB" in PAGE
    assert sockets.max_message == MAX_MESSAGE_BYTES
    assert f"{sockets.max_unread:,} to be read, {sockets.max_queued:,} to be sent" in PAGE
    assert f"{sockets.backlog:,}; {sockets.connect:.0f} s" in PAGE
    bounds = f"{bootstrap.MAX_BODY >> 10} KiB, {bootstrap.MAX_CLIENTS:,} at once, {directory.RANKS:,} ranks under "
    assert bounds + f"{directory.KEYS:,} keys" in PAGE
    assert f"{bootstrap_client.MAX_ANSWER >> 20} MiB" in PAGE
    assert f"{plans.MAX_PLACEMENTS:,} and {plans.MAX_PLANS}" in PAGE
    assert f"{secret.MIN_BYTES} to {secret.MAX_BYTES:,} bytes" in PAGE
    assert signing.WINDOW == 60
    assert signing.HEADER in PAGE
    assert fuzz_wire.SECONDS == 1
    assert (fuzz_wire.ADDRESS_SPACE >> 30, fuzz_wire.ALLOWANCE >> 20) == (1, 32)
    assert (fuzz_wire.PER_BYTE, fuzz_wire.MEASURED) == (64, 64)


def test_its_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([a-z.-]*)(#[a-z0-9-]+)?\)", PAGE):
        text = PAGE if not target else (DOCS / target).read_text()
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        slugs = {"#" + re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not anchor or anchor in slugs, (target, anchor)
