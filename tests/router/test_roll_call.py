"""Who answers when the router starts."""

import logging
import socket
import time

import pytest
from starlette.applications import Starlette

from kvferry.router import Patience
from kvferry.testing.openai_engine import HttpPeer, OpenAiEngine, wait_until


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO, "kvferry.router.roll_call")
    return caplog


def test_all_are_there(make_site, caplog):
    site = make_site(prefills=2)
    wait_until(lambda: "5 of 5 engines and bootstrap services answer" in caplog.text, what="the roll is called")
    assert "does not answer" not in caplog.text
    assert site.complete(prompt="a").status_code == 200


def test_who_does_not_answer_is_named_and_used_once_it_does(make_site, caplog):
    absent = OpenAiEngine()
    absent.stop()
    site = make_site(decodes=[absent])
    wait_until(lambda: "2 of 3 engines and bootstrap services answer" in caplog.text, what="the roll is called")
    assert f"decode engine {absent.url} does not answer yet (ConnectError)" in caplog.text
    assert caplog.text.count("does not answer") == 1
    site.decodes.append(OpenAiEngine(port=absent.port))
    assert site.complete(prompt="a").status_code == 200


def test_an_engine_that_knows_no_such_path_is_there(make_site, caplog):
    make_site(decodes=[HttpPeer(Starlette())])
    wait_until(lambda: "3 of 3 engines and bootstrap services answer" in caplog.text, what="the roll is called")


class Mute:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def begin_stop(self) -> None:
        self._socket.close()

    stop = begin_stop


def test_a_router_that_ends_meanwhile_waits_for_nobody(make_site, caplog):
    site = make_site(decodes=[Mute()])
    began = time.monotonic()
    site.router.stop()
    assert time.monotonic() - began < Patience().control
    assert "services answer" not in caplog.text
