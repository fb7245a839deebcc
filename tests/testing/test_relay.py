"""The relay does to messages what it was told, and nothing else."""

import time
from collections.abc import Iterator

import pytest
import zmq

from kvferry.testing.relay import Relay, Weather


class Ends:
    """An echo behind a relay, and a client before it."""

    def __init__(self, weather: Weather) -> None:
        self.context = zmq.Context()
        self.server = self._socket(zmq.ROUTER)
        port = self.server.bind_to_random_port("tcp://127.0.0.1")
        self.relay = Relay(f"tcp://127.0.0.1:{port}", weather, seed=1)
        self.client = self._socket(zmq.DEALER)
        self.client.connect(self.relay.address)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def send(self, count: int) -> None:
        for index in range(count):
            self.client.send(str(index).encode())

    def arrived(self, *, quiet: float = 0.5) -> list[int]:
        """What comes at the server until nothing has come for a while."""
        found = []
        while self.server.poll(quiet * 1000):
            found.append(int(self.server.recv_multipart()[1]))
        return found

    def close(self) -> None:
        self.relay.close()
        self.client.close()
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one = Ends(request.param)
    yield one
    one.close()


@pytest.mark.parametrize("ends", [Weather()], indirect=True)
def test_fair_weather_passes_everything_in_order_and_back(ends: Ends) -> None:
    ends.client.send(b"7")
    who, frame = ends.server.recv_multipart()
    ends.server.send_multipart([who, b"back " + frame])
    assert ends.client.poll(2000)
    assert ends.client.recv() == b"back 7"
    ends.send(50)
    assert ends.arrived() == list(range(50))


@pytest.mark.parametrize("ends", [Weather(repeat=1.0)], indirect=True)
def test_each_message_twice(ends: Ends) -> None:
    ends.send(20)
    assert sorted(ends.arrived()) == sorted([*range(20), *range(20)])


@pytest.mark.parametrize("ends", [Weather(drop=0.5)], indirect=True)
def test_some_are_lost(ends: Ends) -> None:
    ends.send(100)
    found = ends.arrived()
    assert found == sorted(found)
    assert 20 < len(found) < 80
    assert ends.relay.weather.counts["dropped"] == 100 - len(found)


@pytest.mark.parametrize("ends", [Weather(delay=0.3)], indirect=True)
def test_late(ends: Ends) -> None:
    began = time.monotonic()
    ends.send(1)
    assert ends.server.poll(5000)
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("ends", [Weather(jitter=0.3)], indirect=True)
def test_out_of_order(ends: Ends) -> None:
    ends.send(60)
    found = ends.arrived()
    assert sorted(found) == list(range(60))
    assert found != sorted(found)


@pytest.mark.parametrize("ends", [Weather()], indirect=True)
def test_a_cut_breaks_connections_and_takes_new_ones(ends: Ends) -> None:
    ends.send(1)
    assert ends.arrived() == [0]
    monitor = ends.client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    ends.relay.cut()
    assert monitor.poll(2000), "the client notices"
    ends.client.disable_monitor()
    monitor.close()
    fresh = ends._socket(zmq.DEALER)
    fresh.connect(ends.relay.address)
    fresh.send(b"8")
    assert ends.arrived(quiet=2.0)[-1] == 8
    fresh.close()
