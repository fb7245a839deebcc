"""Engines that fail, with real sockets: who is asked next, what becomes of the handoff, and what the client is told."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvferry.router import Patience
from kvferry.testing.openai_engine import HttpPeer, OpenAiEngine, wait_until


def transfer_of(body):
    return body["kv_transfer_params"]["transfer_id"]


def released_by(site):
    return [transfer for peer in site.bootstraps for order in peer.released for transfer in order["transfer_ids"]]


def wait_for_releases(site, transfers):
    wait_until(lambda: sorted(released_by(site)) == sorted(transfers), what="the producer is told")


def test_prefill_moves_on_when_an_engine_is_gone(make_site):
    site = make_site(prefills=2)
    site.prefills[0].stop()
    for _ in range(4):
        assert site.complete(prompt="a").status_code == 200
    assert len(site.prefills[1].received) == 4
    assert {body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()} == {"P1"}
    # Nobody was reached there, so there is nothing to release; and after the first try it was left alone.
    assert released_by(site) == []
    url = site.prefills[0].url
    sample = f'kvferry_router_attempts_total{{engine="{url}",outcome="engine-unreachable",role="prefill"}}'
    assert site.metric(sample) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_prefill_moves_on_with_a_new_transfer_when_an_engine_fails(make_site, status):
    site = make_site(prefills=2)
    site.prefills[0].mood.status = site.prefills[1].mood.status = status
    last = site.complete(prompt="a")
    assert last.status_code == status
    assert len({transfer_of(body) for body in site.prefilled()}) == 2
    assert site.decoded() == []
    wait_for_releases(site, [transfer_of(body) for body in site.prefilled()])

    site.prefills[1].mood.status = 200
    assert site.complete(prompt="a").status_code == 200


def test_a_silent_prefill_engine_is_given_up(make_site):
    site = make_site(prefills=2, patience=Patience(connect=1, prefill=0.2, decode=5))
    site.prefills[0].mood.silent = True
    site.prefills[1].mood.silent = True
    answer = site.complete(prompt="a")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no prefill engine answered (last: engine-timed-out)"
    wait_until(lambda: site.prefills[0].left, what="the silent engine is let go")
    wait_for_releases(site, [transfer_of(body) for body in site.prefilled()])


def test_prefill_moves_on_when_an_engine_is_stopped_while_it_computes(make_site):
    site = make_site(prefills=2)
    site.prefills[0].mood.abort_after = 0
    assert site.complete(prompt="a").status_code == 200
    first, second = site.prefilled()
    assert [transfer_of(body) for body in site.decoded()] == [transfer_of(second)]
    wait_for_releases(site, [transfer_of(first)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_a_stopping_engine_ended_before_its_first_output_is_taken_over(make_site, *, stream, chat):
    site = make_site(decodes=2)
    site.decodes[0].mood.abort_after = 0 if stream else 1
    asked = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    answer = site.chat(**asked) if chat else site.complete(prompt="a", **asked)
    assert answer.status_code == 200
    assert "abort" not in answer.text
    assert answer.text.count(".2 ") == 1
    first, second = (transfer_of(body) for body in site.decoded())
    assert first != second
    wait_for_releases(site, [first])


def test_an_answer_that_a_stopping_engine_ended_after_its_first_output_says_so(make_site):
    site = make_site(decodes=2)
    site.decodes[0].mood.abort_after = 1
    answer = site.complete(prompt="a", stream=True)
    assert '"finish_reason":"abort"' in answer.text.replace(" ", "")
    assert len(site.decoded()) == 1


def test_without_any_prefill_engine_decode_computes_the_prompt_only_if_allowed(make_site):
    refusing = make_site()
    refusing.prefills[0].stop()
    assert refusing.complete(prompt="a").status_code == 503
    allowed = make_site(decode_alone=True)
    allowed.prefills[0].stop()
    assert allowed.complete(prompt="a").status_code == 200
    assert "kv_transfer_params" not in allowed.decoded()[0]


def test_decode_moves_on_with_the_same_transfer_when_an_engine_was_not_reached(make_site):
    site = make_site(decodes=2)
    site.decodes[0].stop()
    assert site.complete(prompt="a").status_code == 200
    assert site.complete(prompt="a").status_code == 200
    assert len(site.prefilled()) == 2
    assert [transfer_of(body) for body in site.decoded()] == [transfer_of(body) for body in site.prefilled()]
    assert released_by(site) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_transfer_that_a_failed_decode_engine_may_have_pulled_is_never_offered_again(make_site, stream):
    site = make_site(prefills=1, decodes=2)
    site.decodes[0].mood.status = site.decodes[1].mood.status = 500
    answer = site.complete(prompt="a", stream=stream)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "ToldError"
    offered = [transfer_of(body) for body in site.decoded()]
    assert len(offered) == len(set(offered)) == 3
    assert sorted(offered) == sorted(transfer_of(body) for body in site.prefilled())
    assert min(len(decode.received) for decode in site.decodes) == 1
    wait_for_releases(site, offered)


def test_a_stream_that_begins_with_an_error_is_served_by_another_engine(make_site):
    site = make_site(decodes=2)
    site.decodes[0].mood.error_event = 500
    for _ in range(2):
        answer = site.chat(stream=True)
        assert answer.status_code == 200
        assert "ToldError" not in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    assert site.metric("kvferry_router_first_output_seconds_count") == 2


def test_a_stream_error_that_is_a_verdict_becomes_the_status(make_site):
    site = make_site(decodes=2)
    site.decodes[0].mood.error_event = site.decodes[1].mood.error_event = 400
    answer = site.complete(prompt="a", stream=True)
    assert answer.status_code == 400
    assert len(site.decoded()) == 1


def test_a_stream_that_breaks_off_ends_with_an_error_and_no_half_event(make_site):
    site = make_site()
    site.decodes[0].mood.break_after = 2
    answer = site.complete(prompt="a", stream=True)
    assert answer.status_code == 200
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["error"]["code"] == 502
    assert [json.loads(item)["choices"][0]["text"] for item in data[:-2]] == ["a/None.0 ", "a/None.1 "]
    assert len(site.decoded()) == 1
    assert site.get("/health").json()["decode"][0]["standing"] == "cooling"


def test_a_prompt_whose_decode_failed_is_prefilled_elsewhere_though_that_engine_is_busier(make_site):
    """The prefill engine may be the cause: a transfer that failed says nothing of which end did."""
    site = make_site(prefills=2, rounds=2, patience=Patience(connect=1, prefill=3, decode=5))
    for prefill in site.prefills:
        prefill.mood.silent = True
    site.decodes[0].mood.status = 500
    waiting = threading.Thread(target=lambda: site.complete(prompt="slow"))
    waiting.start()
    wait_until(lambda: len(site.prefilled()) == 1, what="one engine is busy")
    busy, idle = sorted(site.prefills, key=lambda prefill: -len(prefill.received))
    busy.mood.silent = idle.mood.silent = False
    site.complete(prompt="a")
    assert [request.body["prompt"] for request in idle.received] == ["a"]
    assert [request.body["prompt"] for request in busy.received] == ["slow", "a"]
    waiting.join()


def test_a_busy_decode_engine_is_not_asked_again_though_it_has_less_to_do(make_site):
    site = make_site(decodes=2)
    for decode in site.decodes:
        decode.mood.silent_after = 1
    body = {"model": "toy", "prompt": "open", "stream": True}
    with site.client.stream("POST", "/v1/completions", json=body):
        wait_until(lambda: len(site.decoded()) == 1, what="one engine is busy")
        free, full = sorted(site.decodes, key=lambda decode: len(decode.received))
        free.mood.status = 429
        full.mood.silent_after = None
        assert site.complete(prompt="a").status_code == 200
    assert len(free.received) == 1
    assert len(full.received) == 2


def test_one_failing_piece_ends_the_batch_and_lets_the_others_go(make_site):
    site = make_site(decodes=[OpenAiEngine()])
    site.prefills[0].mood.status = 400
    site.prefills[0].mood.only_for = "b"
    site.decodes[0].mood.silent = True
    answer = site.complete(prompt=["a", "b", "c"], stream=True)
    assert answer.status_code == 400
    wait_until(lambda: site.metric("kvferry_router_open_requests") == 0, what="all pieces have ended", seconds=3)
    assert len(site.decodes[0].left) == len(site.decodes[0].received)
    assert site.metric('kvferry_router_requests_total{route="/v1/completions",status="400"}') == 1


def test_a_client_that_leaves_while_a_prompt_is_computed_stops_it(make_site):
    site = make_site()
    site.prefills[0].mood.silent = True
    with pytest.raises(httpx.ReadTimeout):
        site.client.post("/v1/completions", json={"prompt": "a"}, timeout=0.5)
    wait_until(lambda: site.prefills[0].left, what="the prefill engine is let go")
    wait_for_releases(site, [transfer_of(site.prefilled()[0])])
    assert site.decoded() == []


def test_a_client_that_leaves_before_the_first_output_frees_the_producer(make_site):
    site = make_site()
    site.decodes[0].mood.silent = True
    with pytest.raises(httpx.ReadTimeout):
        site.client.post("/v1/completions", json={"prompt": "a"}, timeout=0.5)
    wait_until(lambda: site.decodes[0].left, what="the decode engine is let go")
    wait_for_releases(site, [transfer_of(site.prefilled()[0])])
    order = site.bootstraps[0].released[0]
    assert order["engine_id"] == "P0"
    # The engine did nothing wrong.
    assert site.get("/health").json()["decode"][0]["standing"] == "ready"


def test_a_foreign_producer_is_not_sent_what_it_does_not_know(make_site):
    site = make_site(kvferry=False)
    site.decodes[0].stop()
    assert site.complete(prompt="a").status_code == 503
    assert site.metric('kvferry_router_releases_total{outcome="unsupported"}') == 1


def test_a_restarted_prefill_engine_is_known_by_its_new_id(make_site):
    site = make_site(directory_ttl=5.0)
    site.complete(prompt="a")
    site.complete(prompt="a")
    assert site.bootstraps[0].queries == 1
    site.bootstraps[0].engine_ids = ["P0-again"]
    site.clock.now += 5.0
    site.complete(prompt="a")
    engines = [body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()]
    assert engines == ["P0", "P0", "P0-again"]


def test_a_decode_failure_makes_the_router_ask_for_the_engine_id_again(make_site):
    """Restarted within the time for which an id is believed: decode fails once, the retry has the new id."""
    site = make_site(rounds=2)
    site.complete(prompt="a")
    site.bootstraps[0].engine_ids = ["P0-again"]
    site.decodes[0].mood.status = 500
    site.complete(prompt="a")
    engines = [body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()]
    assert engines == ["P0", "P0", "P0-again"]


@pytest.mark.parametrize("entries", [[], None])
def test_a_prefill_engine_whose_bootstrap_does_not_know_it_is_passed_over(make_site, entries):
    site = make_site(prefills=2)
    if entries is None:
        site.bootstraps[0].stop()
    else:
        site.bootstraps[0].engine_ids = entries
    for _ in range(2):
        assert site.complete(prompt="a").status_code == 200
    assert site.prefills[0].received == []


def test_an_engine_that_comes_back_is_used_again_after_its_pause(make_site):
    site = make_site(decodes=2)
    port = site.decodes[0].port
    site.decodes[0].stop()
    for _ in range(3):
        assert site.complete(prompt="a").status_code == 200
    site.decodes[0] = OpenAiEngine(port=port)
    for _ in range(2):
        site.complete(prompt="a")
    assert site.decodes[0].received == []
    site.clock.now += 5.0
    for _ in range(4):
        site.complete(prompt="a")
    assert len(site.decodes[0].received) == 2


def test_a_lone_engine_that_comes_back_is_used_at_once(make_site):
    """A pause only orders engines: with nobody else to ask, nothing is refused for the rest of it."""
    site = make_site()
    port = site.decodes[0].port
    site.decodes[0].stop()
    assert site.complete(prompt="a").status_code == 503
    assert site.get("/health").status_code == 503
    site.decodes[0] = OpenAiEngine(port=port)
    assert site.complete(prompt="a").status_code == 200
    assert site.get("/health").status_code == 200


def test_a_killed_decode_process_in_mid_stream_is_told_to_the_client_at_once(make_site, engine_process):
    decode = engine_process("1")
    site = make_site(decodes=[decode])
    body = {"model": "toy", "prompt": "a", "stream": True}
    with site.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "a/None.0 "
        decode.kill()
        began = time.monotonic()
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert time.monotonic() - began < 5
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["code"] == 502


def test_a_prefill_process_killed_while_computing_is_replaced(make_site, engine_process):
    prefill = engine_process("silent")
    site = make_site(prefills=[prefill, OpenAiEngine()])
    answers = []
    asking = threading.Thread(target=lambda: answers.append(site.complete(prompt="a")))
    asking.start()
    prefill.wait_for("received")
    prefill.kill()
    asking.join(timeout=5)
    assert answers[0].status_code == 200
    assert [body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()] == ["P1"]
    wait_until(lambda: len(site.bootstraps[0].released) == 1, what="the lost handoff is released")
    assert transfer_of(site.decoded()[0]) not in released_by(site)


def test_a_decode_process_killed_before_its_first_output_is_replaced(make_site, engine_process):
    decode = engine_process("silent")
    site = make_site(decodes=[decode, OpenAiEngine()])
    answers = []
    asking = threading.Thread(target=lambda: answers.append(site.complete(prompt="a", stream=True)))
    asking.start()
    decode.wait_for("received")
    decode.kill()
    asking.join(timeout=5)
    assert answers[0].status_code == 200
    assert answers[0].text.endswith("data: [DONE]\n\n")
    first, second = [transfer_of(body) for body in site.prefilled()]
    assert transfer_of(site.decodes[1].received[0].body) == second
    wait_for_releases(site, [first])


def test_a_bootstrap_that_does_not_answer_is_waited_for_once(make_site):
    """By all who need it together, not by one after the other."""
    site = make_site(prefills=2, patience=Patience(connect=1, prefill=5, decode=5, control=0.5))
    site.bootstraps[0].stop()
    with socket.create_server(("127.0.0.1", site.bootstraps[0].port), backlog=64), ThreadPoolExecutor(24) as clients:
        began = time.monotonic()
        answers = list(clients.map(lambda _: site.complete(prompt="a"), range(24)))
        took = time.monotonic() - began
    assert {answer.status_code for answer in answers} == {200}
    assert took < 3


def test_a_bootstrap_that_answers_without_an_end_is_given_up(make_site):
    site = make_site(prefills=2, patience=Patience(connect=1, prefill=5, decode=5, control=0.3))
    site.bootstraps[0].stop()
    over = threading.Event()

    def drip(listening):
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not over.wait(0.05):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", site.bootstraps[0].port)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        began = time.monotonic()
        assert {site.complete(prompt="a").status_code for _ in range(2)} == {200}
        took = time.monotonic() - began
        over.set()
        thread.join(timeout=10)
    assert took < 3
    sample = (
        f'kvferry_router_attempts_total{{engine="{site.prefills[0].url}",outcome="engine-timed-out",role="prefill"}}'
    )
    assert site.metric(sample) == 1


@pytest.mark.parametrize("role", ["prefills", "decodes"])
def test_a_redirection_is_a_fault_and_never_the_clients(make_site, role):
    site = make_site(prefills=2, decodes=2)
    getattr(site, role)[0].mood.status = 302
    getattr(site, role)[0].mood.headers = {"location": "http://10.0.0.1/"}
    assert {site.complete(prompt="a").status_code for _ in range(2)} == {200}


def test_a_prefill_address_that_answers_with_something_else_is_passed_over(make_site):
    async def page(request):
        return Response("<html>")

    odd = HttpPeer(Starlette(routes=[Route("/v1/completions", page, methods=["POST"])]))
    site = make_site(prefills=[odd, OpenAiEngine()])
    assert {site.complete(prompt="a").status_code for _ in range(2)} == {200}
    assert {body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()} == {"P1"}
    wait_until(lambda: site.bootstraps[0].released, what="what it may have kept is released")


def test_an_answer_that_does_not_end_after_its_last_event_is_an_answer(make_site):
    async def answer(request):
        async def generate():
            yield b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
            while (await request.receive())["type"] != "http.disconnect":
                pass

        return StreamingResponse(generate(), media_type="text/event-stream")

    site = make_site(decodes=[HttpPeer(Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])]))])
    began = time.monotonic()
    got = site.complete(prompt="a", stream=True)
    assert got.content == b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    assert time.monotonic() - began < 4
