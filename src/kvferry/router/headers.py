"""Which headers pass through, in both directions.

All but those that speak of one connection (RFC 9110 section 7.6.1), and those that no longer fit a body that
was rewritten. A request without ``x-request-id`` gets one, so that the logs of the two engines can be laid
side by side; the pieces of a batch get a suffix each, because an engine may key its requests by this id.
"""

from collections.abc import Iterable

from kvferry.router.faults import Headers

_ONE_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_OF_THE_OLD_BODY = frozenset(
    {"host", "content-length", "content-type", "accept-encoding", "expect", "content-encoding"}
)
_OF_THE_SERVER = frozenset({"content-length", "date", "server"})

REQUEST_ID = "x-request-id"
DATA_PARALLEL_RANK = "x-data-parallel-rank"


def to_engine(headers: Iterable[tuple[str, str]], *, request_id: str) -> Headers:
    """The client's headers as an engine gets them."""
    kept = _passing(headers, _OF_THE_OLD_BODY | {REQUEST_ID})
    return (
        *kept,
        (REQUEST_ID, request_id),
        ("content-type", "application/json"),
        # Answers are read event by event: a compressed one would have to be unpacked first.
        ("accept-encoding", "identity"),
    )


def for_rank(headers: Headers, rank: int | None) -> Headers:
    """The same, addressed to one data-parallel rank; a rank that the client named is meant for decode."""
    others = tuple(pair for pair in headers if pair[0].lower() != DATA_PARALLEL_RANK)
    return others if rank is None else (*others, (DATA_PARALLEL_RANK, str(rank)))


def to_client(headers: Iterable[tuple[str, str]], *, request_id: str) -> Headers:
    """An engine's headers as the client gets them."""
    # An engine that repeats the id of its request repeats that of a piece.
    return (*_passing(headers, _OF_THE_SERVER | {REQUEST_ID}), (REQUEST_ID, request_id))


def raw(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Headers as they go over the wire: a character is a byte, whatever the two ends mean by it."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def read(raw_headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The reverse of ``raw``; never fails."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in raw_headers)


def _passing(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> Headers:
    pairs = tuple(headers)
    named = {
        token.strip().lower() for name, value in pairs if name.lower() == "connection" for token in value.split(",")
    }
    gone = _ONE_CONNECTION | dropped | named
    return tuple((name, value) for name, value in pairs if name.lower() not in gone)
