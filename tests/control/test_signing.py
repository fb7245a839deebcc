"""Signed orders: what is taken, what is refused, and that nothing is taken twice."""

from dataclasses import dataclass, field

import pytest

from kvferry.control import Secret, Signer, Verifier
from kvferry.control.signing import HEADER, WINDOW
from kvferry.errors import ProtocolReason, RemoteProtocolError

SECRET = Secret.of(b"5b3f0d6a9c1e47b28d5502f0a7e6c4d1", source="test")
OTHER = Secret.of(b"1d4c6e7a0f2055d82b74e1c9a6d0f3b5", source="test")
BODY = b'{"engine_id": "p"}'


@dataclass
class Clock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Exchange:
    sender: Clock = field(default_factory=Clock)
    receiver: Clock = field(default_factory=Clock)
    max_nonces: int = 1000

    def __post_init__(self) -> None:
        self.signer = Signer(SECRET, clock=self.sender)
        self.verifier = Verifier(SECRET, clock=self.receiver, max_nonces=self.max_nonces)

    def signed(self, *, secret: Secret = SECRET) -> str:
        return Signer(secret, clock=self.sender).headers("POST", "/register", BODY)[HEADER]

    def refusal(
        self, header: str | None, *, method: str = "POST", path: str = "/register", body: bytes = BODY
    ) -> RemoteProtocolError | None:
        try:
            self.verifier.check(header, method=method, path=path, body=body)
        except RemoteProtocolError as error:
            return error
        return None


def test_while_a_secret_is_changed_orders_signed_with_the_other_one_are_taken_once_too() -> None:
    old, new = b"5b3f0d6a9c1e47b28d5502f0a7e6c4d1", b"1d4c6e7a0f2055d82b74e1c9a6d0f3b5"
    both = Secret.of(new + b"\n" + old, source="test")
    exchange = Exchange()
    exchange.verifier = Verifier(both, clock=exchange.receiver)
    for secret in (SECRET, OTHER, both):
        header = exchange.signed(secret=secret)
        assert exchange.refusal(header) is None
        assert "replay" in str(exchange.refusal(header))
    stranger = Secret.of(new.upper(), source="test")
    assert "another secret" in str(exchange.refusal(exchange.signed(secret=stranger)))
    assert Exchange().refusal(exchange.signed(secret=both)) is not None, "it is signed with the first"


def test_a_signed_order_is_taken_once() -> None:
    exchange = Exchange()
    header = exchange.signed()
    assert exchange.refusal(header) is None
    again = exchange.refusal(header)
    assert again is not None
    assert again.reason is ProtocolReason.UNAUTHORIZED
    assert "replay" in again.message
    assert exchange.refusal(exchange.signed()) is None
    assert exchange.verifier.refused == 1


def test_another_secret_method_path_or_body_is_refused() -> None:
    exchange = Exchange()
    for error in (
        exchange.refusal(exchange.signed(secret=OTHER)),
        exchange.refusal(exchange.signed(), method="PUT"),
        exchange.refusal(exchange.signed(), path="/kvferry/release"),
        exchange.refusal(exchange.signed(), body=BODY + b" "),
    ):
        assert error is not None
        assert error.reason is ProtocolReason.UNAUTHORIZED
        assert "another secret" in error.message


def test_every_changed_character_is_noticed() -> None:
    exchange = Exchange()
    header = exchange.signed()
    for place, letter in enumerate(header):
        changed = header[:place] + ("0" if letter != "0" else "1") + header[place + 1 :]
        assert exchange.refusal(changed) is not None, place
    assert exchange.refusal(header) is None


@pytest.mark.parametrize(
    "header",
    ["", "1", "1 2 3", "2 1800000000 " + "0" * 32 + " " + "0" * 64, "1 1800000000 " + "0" * 31 + " " + "0" * 64]
    + ["1 1800000000 " + "g" * 32 + " " + "0" * 64, "1 x " + "0" * 32 + " " + "0" * 64, "1 " + "9" * 5000]
    + ["1 1800000000 " + "0" * 32 + " " + "\u0660" * 64, "\udcff" * 40],
)
def test_other_forms_are_refused(header: str) -> None:
    error = Exchange().refusal(header)
    assert error is not None
    assert error.reason is ProtocolReason.UNAUTHORIZED


def test_a_missing_header_is_refused_with_the_remedy() -> None:
    error = Exchange().refusal(None)
    assert error is not None
    assert "secret_file" in error.message


@pytest.mark.parametrize(
    ("apart", "taken"), [(0, True), (WINDOW, True), (-WINDOW, True), (WINDOW + 1, False), (-WINDOW - 1, False)]
)
def test_the_clocks_may_differ_by_the_window(apart: float, taken: bool) -> None:
    exchange = Exchange()
    exchange.receiver.now += apart
    error = exchange.refusal(exchange.signed())
    assert (error is None) is taken
    assert taken or "NTP" in str(error)


@pytest.mark.parametrize("ahead", [0.0, WINDOW, -WINDOW])
def test_no_replay_is_taken_at_any_later_time(ahead: float) -> None:
    exchange = Exchange()
    exchange.sender.now += ahead
    header = exchange.signed()
    assert exchange.refusal(header) is None
    for _ in range(int(4 * WINDOW)):
        exchange.receiver.now += 1
        exchange.refusal(exchange.signed())  # others come by, and old ones are forgotten
        assert exchange.refusal(header) is not None


def test_the_memory_is_bounded_and_frees_itself() -> None:
    exchange = Exchange(max_nonces=3)
    assert [exchange.refusal(exchange.signed()) for _ in range(3)] == [None] * 3
    full = exchange.refusal(exchange.signed())
    assert full is not None
    assert full.reason is ProtocolReason.LIMIT_EXCEEDED
    for clock in (exchange.sender, exchange.receiver):
        clock.now += 2 * WINDOW + 1
    assert exchange.refusal(exchange.signed()) is None
