"""What vLLM tells of an engine's cache on its own ``/metrics`` page: the labels of ``vllm:cache_config_info``.

One sample for each engine behind the API server (its data parallel ranks). Proxies of the environment are not used.
"""

import re
from collections.abc import Mapping
from typing import Final

import httpx

from kvferry.control.tls import client_context
from kvferry.errors import ProtocolReason, RemoteProtocolError

NAME: Final = "vllm:cache_config_info"
MAX_PAGE: Final = 16 << 20

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def read_cache_info(url: str, *, timeout: float = 5.0, ca: str | None = None) -> tuple[Mapping[str, str], ...]:
    """The labels of each engine at ``url``: an API server, or its metrics page. Raises :class:`RemoteProtocolError`."""
    page = url if url.endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False, verify=client_context(ca)) as client,
            client.stream("GET", page) as answer,
        ):
            if answer.status_code != 200:
                raise _malformed(page, f"answers with status {answer.status_code}")
            text = _bounded(answer, page)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"{page} cannot be read: {type(error).__name__}") from error
    found = parse_cache_info(text)
    if not found:
        raise _malformed(page, f"has no sample of {NAME}: it is no metrics page of vLLM's")
    return found


def parse_cache_info(page: str) -> tuple[Mapping[str, str], ...]:
    """The labels of each sample on a page in Prometheus' text form.

    >>> parse_cache_info('vllm:cache_config_info{block_size="32",engine="0"} 1.0')
    ({'block_size': '32', 'engine': '0'},)
    """
    return tuple(
        {name: _unescaped(value) for name, value in _LABEL.findall(line)}
        for line in page.splitlines()
        if line.startswith(NAME + "{")
    )


def _bounded(answer: httpx.Response, page: str) -> str:
    data = bytearray()
    for piece in answer.iter_bytes():
        data += piece
        if len(data) > MAX_PAGE:
            raise _malformed(page, f"is longer than {MAX_PAGE} bytes")
    return data.decode(errors="replace")


def _unescaped(value: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPED.get(found[0], found[0]), value)


def _malformed(page: str, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.MALFORMED, f"{page} {what}")
