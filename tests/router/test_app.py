"""The router over real HTTP: what each side gets when all is well, and who is told what when not."""

import json
import socket
import threading

import httpx
import pytest

from kvferry.testing.openai_engine import OpenAiEngine, wait_until


def events_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]


def test_one_prompt_is_prefilled_then_decoded_under_one_transfer_id(make_site):
    site = make_site()
    answer = site.complete(prompt="abc", max_tokens=3, min_tokens=2, stop=["x"], seed=7)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abc/7.0 abc/7.1 abc/7.2 "

    (prefilled,), (decoded,) = site.prefilled(), site.decoded()
    transfer = prefilled["kv_transfer_params"]["transfer_id"]
    assert prefilled == {
        "model": "toy",
        "prompt": "abc",
        "seed": 7,
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer},
    }
    assert decoded == {
        "model": "toy",
        "prompt": "abc",
        "seed": 7,
        "max_tokens": 3,
        "min_tokens": 2,
        "stop": ["x"],
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": "P0",
            "remote_bootstrap_addr": site.bootstraps[0].url,
        },
    }
    assert len(transfer) == 32
    assert site.bootstraps[0].released == []


def test_a_stream_passes_through_byte_for_byte(make_site):
    site = make_site()
    body = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
    routed = site.complete(**body, headers={"x-request-id": "same"})
    direct = httpx.post(
        site.decodes[0].url + "/v1/completions",
        json={"model": "toy", **body},
        headers={"x-request-id": "same"},
        trust_env=False,
    )
    assert routed.content == direct.content
    assert routed.headers["content-type"].startswith("text/event-stream")
    assert "stream_options" not in site.prefilled()[0]
    assert site.prefilled()[0]["stream"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_to_an_engine_is_used_again(make_site, stream):
    site = make_site()
    for _ in range(3):
        assert site.complete(prompt="a", stream=stream).status_code == 200
    for engine in (site.prefills[0], site.decodes[0]):
        assert len({request.port for request in engine.received}) == 1


def test_events_reach_the_client_before_the_answer_is_complete(make_site):
    site = make_site()
    site.decodes[0].mood.silent_after = 2
    body = {"model": "toy", "prompt": "abc", "stream": True}
    with site.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        seen = [line for line in (next(lines) for _ in range(3)) if line]
        assert len(seen) == 2
    # Hanging up here must reach the engine, though it was silent.
    wait_until(lambda: site.decodes[0].left, what="the decode engine is let go")
    wait_until(
        lambda: site.metric('kvferry_router_requests_total{route="/v1/completions",status="499"}') == 1,
        what="the leaver is counted",
    )


def test_chat_streams_and_counts_max_completion_tokens(make_site):
    site = make_site()
    answer = site.chat(stream=True, max_completion_tokens=2)
    events = [json.loads(data) for data in events_of(answer)[:-1]]
    assert events_of(answer)[-1] == "[DONE]"
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "hi/None.0 "},
        {"content": "hi/None.1 "},
    ]
    assert site.prefilled()[0]["max_completion_tokens"] == 1
    assert site.prefilled()[0]["max_tokens"] == 1
    assert site.decoded()[0]["max_completion_tokens"] == 2


def test_headers_pass_both_ways_without_those_of_one_connection(make_site):
    site = make_site()
    site.decodes[0].mood.headers = {"x-engine": "d0", "x-request-id": "r1", "keep-alive": "timeout=9"}
    sent = {
        "authorization": "Bearer secret",
        "x-request-id": "r1",
        "traceparent": "00-1-2-01",
        "connection": "x-hop",
        "x-hop": "1",
        "te": "trailers",
    }
    answer = site.complete(prompt="abc", headers=sent)
    for engine in (site.prefills[0], site.decodes[0]):
        got = engine.received[0].headers
        assert {name: got[name] for name in ("authorization", "x-request-id", "traceparent")} == {
            "authorization": "Bearer secret",
            "x-request-id": "r1",
            "traceparent": "00-1-2-01",
        }
        assert not {"x-hop", "te"} & set(got)
        assert got["host"] == engine.url.removeprefix("http://")
    assert answer.headers["x-engine"] == "d0"
    assert answer.headers.get_list("x-request-id") == ["r1"]
    assert "keep-alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1


def test_a_request_without_an_id_gets_the_same_one_on_both_engines_and_in_the_answer(make_site):
    site = make_site()
    answer = site.complete(prompt="abc")
    ids = {engine.received[0].headers["x-request-id"] for engine in (site.prefills[0], site.decodes[0])}
    assert ids == {answer.headers["x-request-id"]}


def test_each_choice_of_each_prompt_has_its_own_transfer_and_the_answers_are_merged(make_site):
    site = make_site(prefills=2, decodes=2)
    answer = site.complete(prompt=["a", "bb"], n=2, seed=5, max_tokens=2).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "a/5.0 a/5.1 "),
        (1, "a/6.0 a/6.1 "),
        (2, "bb/5.0 bb/5.1 "),
        (3, "bb/6.0 bb/6.1 "),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    sent = [body["kv_transfer_params"]["transfer_id"] for body in site.prefilled()]
    pulled = [body["kv_transfer_params"]["transfer_id"] for body in site.decoded()]
    assert sorted(sent) == sorted(pulled)
    assert len(set(sent)) == 4
    assert {body["n"] for body in site.decoded()} == {1}
    assert all("n" not in body for body in site.prefilled())
    assert len({request.headers["x-request-id"] for d in site.decodes for request in d.received}) == 4


def test_a_streamed_batch_is_one_stream(make_site):
    site = make_site()
    body = {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}}
    data = events_of(site.complete(**body, headers={"x-request-id": "r"}))
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    events = [json.loads(item) for item in data[:-1]]
    assert {event["id"] for event in events} == {"cmpl-r"}
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts[0].startswith("[1, 2]/")
    assert texts[1].startswith("[3]/")
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens"] == len("[1, 2]") + len("[3]")
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert sum("usage" in event for event in events) == 1


def test_a_list_of_token_ids_is_one_prompt(make_site):
    site = make_site()
    site.complete(prompt=[1, 2, 3])
    assert [body["prompt"] for body in site.decoded()] == [[1, 2, 3]]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "prompt_logprobs": 0},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": None},
    ],
)
def test_what_decode_must_compute_itself_is_not_prefilled(make_site, body):
    site = make_site()
    assert site.complete(**body).status_code == 200
    assert site.prefilled() == []
    assert "kv_transfer_params" not in site.decoded()[0]


def test_transfer_parameters_of_a_client_are_dropped(make_site):
    site = make_site()
    site.complete(prompt="a", kv_transfer_params={"remote_bootstrap_addr": "http://elsewhere", "x": 1})
    for body in site.prefilled() + site.decoded():
        assert "x" not in body["kv_transfer_params"]
    assert site.decoded()[0]["kv_transfer_params"]["remote_bootstrap_addr"] == site.bootstraps[0].url


def test_what_the_prefill_engine_says_of_itself_wins_but_never_the_transfer_id(make_site):
    site = make_site()
    site.prefills[0].mood.params = {"remote_engine_id": "newer", "extra": 3, "transfer_id": "other"}
    site.complete(prompt="a")
    params = site.decoded()[0]["kv_transfer_params"]
    assert params["remote_engine_id"] == "newer"
    assert params["extra"] == 3
    assert params["transfer_id"] == site.prefilled()[0]["kv_transfer_params"]["transfer_id"]


def test_data_parallel_ranks_take_turns_and_decode_is_told_the_right_engine(make_site):
    site = make_site(ranks=2)
    for _ in range(4):
        site.complete(prompt="a", headers={"x-data-parallel-rank": "7"})
    ranks = [request.headers["x-data-parallel-rank"] for request in site.prefills[0].received]
    engines = [body["kv_transfer_params"]["remote_engine_id"] for body in site.decoded()]
    assert sorted(ranks) == ["0", "0", "1", "1"]
    assert engines == [f"P0-dp{rank}" for rank in ranks]
    assert {request.headers["x-data-parallel-rank"] for request in site.decodes[0].received} == {"7"}


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        (b"[" * 100_000, None),
        (b'{"prompt": "a", "n": 0}', "n"),
        (b'{"prompt": "a", "stream": "false"}', "stream"),
        (b'{"prompt": ["a", "b"], "n": 600}', "prompt"),
    ],
)
def test_a_bad_request_is_refused_in_openai_form_without_asking_an_engine(make_site, content, param):
    site = make_site()
    answer = site.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400
    assert answer.json()["error"]["param"] == param
    assert site.prefilled() == []


def test_a_body_is_read_up_to_its_limit(make_site):
    site = make_site(max_body=1000)
    for length, status in ((1000, 200), (1001, 413), (100_000, 413)):
        body = b'{"prompt": "%s"}' % (b"a" * (length - 14))
        assert len(body) == length
        answer = site.client.post("/v1/completions", content=iter([body[:500], body[500:]]))
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == 413
    assert len(site.prefilled()) == 1


def test_an_engines_verdict_on_the_request_is_the_clients_answer(make_site):
    site = make_site(prefills=2, decodes=2)
    for prefill in site.prefills:
        prefill.mood.status = 400
    answer = site.complete(prompt="a")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "ToldError"
    assert len(site.prefilled()) == 1
    assert site.decoded() == []


def test_unknown_routes_answer_in_openai_form(make_site):
    answer = make_site().get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404


def test_models_and_metrics_and_health(make_site):
    site = make_site(decodes=2)
    site.decodes[0].stop()
    for _ in range(2):
        assert site.get("/v1/models").json()["data"][0]["id"] == "toy"
    site.complete(prompt="a")
    # Counted when the answer is on its way, so perhaps a moment after the client has it.
    served = 'kvferry_router_requests_total{route="/v1/completions",status="200"}'
    wait_until(lambda: site.metric(served) == 1, what="the request is counted")
    assert site.metric("kvferry_router_open_requests") == 0
    health = site.get("/health")
    assert health.status_code == 200
    assert [engine["standing"] for engine in health.json()["decode"]] == ["cooling", "ready"]


def test_openai_clients_read_the_answers(make_site):
    """The official client as an independent judge of the form; skipped where it is not installed."""
    openai = pytest.importorskip("openai")
    site = make_site()
    with openai.OpenAI(base_url=site.router.url + "/v1", api_key="k", max_retries=0) as client:
        chunks = list(client.completions.create(model="toy", prompt=["a", "b"], stream=True))
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
        site.decodes[0].mood.status = 500
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="toy", prompt="a")


def test_many_requests_at_once_spread_over_the_engines(make_site):
    site = make_site(prefills=2, decodes=2)
    failures: list[int] = []

    def ask(number: int) -> None:
        answer = site.complete(prompt=f"p{number}", max_tokens=1)
        if answer.json()["choices"][0]["text"] != f"p{number}/None.0 ":
            failures.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    counts: list[OpenAiEngine] = [*site.prefills, *site.decodes]
    assert min(len(engine.received) for engine in counts) >= 4


def test_header_values_pass_as_the_bytes_that_they_are(make_site):
    site = make_site()
    site.decodes[0].mood.headers = {"x-note": "\u4f60".encode().decode("latin-1")}
    answer = site.client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-user": "J\xe9r\xf4me".encode("latin-1")}
    )
    assert answer.status_code == 200
    assert {e.received[0].headers["x-user"] for e in (site.prefills[0], site.decodes[0])} == {"J\xe9r\xf4me"}
    assert dict(answer.headers.raw)[b"x-note"] == "\u4f60".encode()


def test_a_list_is_answered_under_the_clients_id_though_engines_repeat_those_of_pieces(make_site):
    site = make_site()
    site.decodes[0].mood.headers = {"x-request-id": "mine-0"}
    answer = site.complete(prompt=["a", "b"], headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_only_the_path_of_a_request_reaches_an_engine(make_site):
    """Not what its Host header looks like when it is put together with it."""
    site = make_site()
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x/sleep?y=\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.router.port)) as client:
        client.sendall(head % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [request.path for request in site.prefills[0].received] == ["/v1/completions"]


def test_times_are_counted_of_what_succeeded(make_site):
    site = make_site()
    site.prefills[0].mood.status = 500
    assert site.complete(prompt="a").status_code == 500
    for name in ("prefill", "first_output"):
        assert site.metric(f"kvferry_router_{name}_seconds_count") == 0
    site.prefills[0].mood.status = 200
    assert site.complete(prompt="a").status_code == 200
    for name in ("prefill", "first_output"):
        assert site.metric(f"kvferry_router_{name}_seconds_count") == 1
