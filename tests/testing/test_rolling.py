"""The audit of a replacement under load sees what it is there to see."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.testing.mixed_load import Ask, Ends, Got, Reference
from kvferry.testing.rolling import Life, Place, Rolled, Timed, account, judge
from kvferry.testing.serve import Connector, Role, Server, ServeSpec

ASK = Ask(7, "a prompt", max_tokens=3, stream=False)
RIGHT = Got(ASK, "finished", "abc", (-0.5,) * 3)
REFERENCES = {ASK.prompt: Reference(RIGHT, RIGHT)}
FAILED = Got(ASK, "failed", said="500: gone")
LOG = "INFO Received request cmpl-rolling-7-0: params: x\nINFO Received request cmpl-rolling-71-0: params: y\n"

LifeOf = Callable[[Role, Connector], Life]


@pytest.fixture
def life(tmp_path: Path) -> LifeOf:
    def of(role: Role, connector: Connector) -> Life:
        name = f"{role}-{connector}"
        server = Server(name, ["true"], url="http://127.0.0.1:1", log=tmp_path / f"{name}.log", environment={})
        server.kill()
        server.log.write_text(LOG)
        return Life(name, role, connector, server)

    return of


def accounted(got: Got, *own: Life) -> Rolled:
    rolled = Rolled()
    ends = Ends("http://127.0.0.1:1", "http://127.0.0.1:1", Path("report"), Path("debug"), "tiny")
    account(Timed(got, began=10.0, ended=12.0), own, REFERENCES, ends, rolled)
    return rolled


def test_a_process_tells_which_requests_it_has_seen(life: LifeOf) -> None:
    assert life("prefill", "ferry").seen() == {"rolling-7", "rolling-71"}
    assert Timed(RIGHT, 0, 1).name == "rolling-7"


def test_a_right_answer_counts_for_the_pairing_that_gave_it(life: LifeOf) -> None:
    rolled = accounted(RIGHT, life("prefill", "upstream"), life("decode", "ferry"))
    assert rolled.pairs == {("upstream", "ferry"): 1}
    assert (rolled.faults, rolled.own, rolled.slowest) == ([], [], 2.0)


def test_an_answer_that_two_engines_were_asked_for_counts_for_none(life: LifeOf) -> None:
    engines = [life("prefill", "upstream"), life("prefill", "ferry"), life("decode", "ferry")]
    rolled = accounted(RIGHT, *engines)
    assert (rolled.again, dict(rolled.pairs)) == (1, {})


def test_a_wrong_answer_is_a_fault(life: LifeOf) -> None:
    rolled = accounted(Got(ASK, "finished", "abd", (-0.5,) * 3), life("prefill", "ferry"), life("decode", "ferry"))
    assert len(rolled.faults) == 1


@pytest.mark.parametrize(
    ("stopped", "gone", "excused"),
    [(11.0, 11.5, True), (9.0, 10.5, True), (11.5, 13.0, True), (8.0, 9.5, False), (12.5, 13.0, False)],
)
def test_a_failure_is_excused_while_its_own_process_is_stopped(
    life: LifeOf, stopped: float, gone: float, *, excused: bool
) -> None:
    prefill, decode = life("prefill", "ferry"), life("decode", "upstream")
    decode.stopped, decode.gone = stopped, gone
    rolled = accounted(FAILED, prefill, decode)
    assert (len(rolled.own), len(rolled.faults)) == ((1, 0) if excused else (0, 1))


def test_a_failure_that_no_process_has_seen_is_a_fault(life: LifeOf) -> None:
    bystander = life("decode", "upstream")
    bystander.stopped, bystander.gone = 11.0, 11.5
    assert len(accounted(FAILED).faults) == 1


def standing_at_the_end(life: LifeOf, answering: Callable[..., str], *ends: tuple[Role, Connector]) -> list[Place]:
    """Places with an idle engine each."""
    places = []
    for role, connector in ends:
        place = Place(ServeSpec(f"{role}-{connector}", role, Path("model"), Path("logs"), connector=connector))
        place.lives.append(life(role, connector))
        told = ("num_requests_running", "num_requests_waiting")
        held = ("kvferry_held_blocks", "kvferry_quarantined_blocks")
        answering((*told, *(held if connector == "ferry" else ())), port=int(place.url.rpartition(":")[2]))
        places.append(place)
    return places


@pytest.mark.parametrize(
    ("prefill", "decode", "silent"),
    [
        ("ferry", "ferry", ["consumer", "producer"]),
        ("ferry", "upstream", ["producer"]),
        ("upstream", "ferry", ["consumer"]),
        ("upstream", "upstream", []),
    ],
)
def test_engines_of_kvferry_must_tell_their_open_transfers_at_the_end(
    prefill: Connector,
    decode: Connector,
    silent: list[str],
    life: LifeOf,
    answering: Callable[..., str],
    tmp_path: Path,
) -> None:
    (tmp_path / "debug").mkdir(mode=0o700)
    (tmp_path / "report").touch()
    places = standing_at_the_end(life, answering, ("prefill", prefill), ("decode", decode))
    rolled = judge((), places, {}, report=tmp_path / "report", debug=tmp_path / "debug")
    assert rolled.faults == [f"no {side} tells its open transfers" for side in silent]


def test_an_engine_of_kvferry_must_tell_what_it_holds_at_the_end(
    life: LifeOf, answering: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "debug").mkdir(mode=0o700)
    (tmp_path / "report").touch()
    places = standing_at_the_end(life, answering, ("prefill", "upstream"), ("decode", "upstream"))
    places[1].lives.append(life("decode", "ferry"))
    rolled = judge((), places, {}, report=tmp_path / "report", debug=tmp_path / "debug")
    assert f"{places[1].url} does not tell vllm:kvferry_held_blocks" in rolled.faults
    assert not [fault for fault in rolled.faults if fault.startswith(places[0].url)]
