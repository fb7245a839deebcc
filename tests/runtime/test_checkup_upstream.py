"""What is declared of an engine under vLLM's own connector, against a metrics page in the form of vLLM's."""

from collections.abc import Callable, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvferry.control import read_cache_info
from kvferry.control.cache_info import parse_cache_info
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.runtime.checkup import Verdict
from kvferry.runtime.checkup.upstream import check_upstream, told_by
from kvferry.runtime.upstream_caches import Declared
from kvferry.testing.openai_engine import HttpPeer
from kvferry.testing.ports import free_port

ServePage = Callable[..., str]


def sample(**labels: str) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{inner}}} 1.0"


def page(*samples: str) -> str:
    head = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge"
    return "\n".join([head, *samples, 'vllm:num_requests_running{engine="0"} 0.0'])


@pytest.fixture
def serve_page() -> Iterator[ServePage]:
    """Serves a text as ``/metrics``."""
    peers: list[HttpPeer] = []

    def serve(text: str, status: int = 200) -> str:
        async def metrics(request: Request) -> Response:
            return PlainTextResponse(text, status)

        peers.append(HttpPeer(Starlette(routes=[Route("/metrics", metrics)])))
        return peers[-1].url

    yield serve
    for peer in peers:
        peer.stop()


def test_a_declaration_that_says_the_same_is_fine(serve_page: ServePage) -> None:
    url = serve_page(page(sample(block_size="128", cache_dtype="fp8_e4m3", kv_cache_layout="LBHNC", engine="0")))
    found = check_upstream(url, Declared(block_size=128, cache_dtype="fp8_e4m3", layout="LBHNC"))
    assert (found.verdict, found.advice) == (Verdict.OK, "")
    assert found.name == f"upstream peer at {url}"


def test_a_declaration_that_contradicts_it_fails_and_the_right_one_is_told(serve_page: ServePage) -> None:
    url = serve_page(page(sample(block_size="128", cache_dtype="auto", kv_cache_layout="None", engine="0")))
    found = check_upstream(f"{url}/metrics", Declared(block_size=64))
    assert found.verdict is Verdict.FAILED
    assert found.said == "it has block_size 128; declared is block_size 64"
    assert '"upstream_peer": {"block_size": 128}' in found.advice


def test_what_is_left_out_is_worth_declaring(serve_page: ServePage) -> None:
    url = serve_page(page(*(sample(block_size="32", cache_dtype="auto", engine=rank) for rank in "01")))
    found = check_upstream(url, Declared())
    assert found.verdict is Verdict.NOTE
    assert '{"block_size": 32}' in found.advice
    assert found.facts == {"told": {"block_size": 32}, "declared": {}}


def test_engines_that_differ_cannot_be_declared_at_once(serve_page: ServePage) -> None:
    url = serve_page(page(sample(block_size="32", engine="0"), sample(block_size="64", engine="1")))
    assert check_upstream(url, Declared()).verdict is Verdict.FAILED


@pytest.mark.parametrize(("text", "status"), [("nothing here", 200), (page(sample(block_size="32")), 404)])
def test_another_page_is_none_of_vllms(serve_page: ServePage, text: str, status: int) -> None:
    url = serve_page(text, status)
    assert check_upstream(url, Declared()).verdict is Verdict.FAILED
    with pytest.raises(RemoteProtocolError) as refused:
        read_cache_info(url)
    assert refused.value.reason is ProtocolReason.MALFORMED


@pytest.mark.parametrize("url", [f"http://127.0.0.1:{free_port()}", "nonsense", "http://[::1"])
def test_nobody_there(url: str) -> None:
    with pytest.raises(RemoteProtocolError) as lost:
        read_cache_info(url)
    assert lost.value.reason is ProtocolReason.PEER_LOST


def test_escaped_labels_are_read_as_they_were_meant() -> None:
    (labels,) = parse_cache_info(sample(block_size="16", path=r"a\"b\\c\nd"))
    assert labels == {"block_size": "16", "path": 'a"b\\c\nd'}
    assert told_by(labels) == {"block_size": 16}
