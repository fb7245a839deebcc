"""An address that answers as an idle engine does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

IDLE = ("num_requests_running", "num_requests_waiting")
HELD = ("kvferry_held_blocks", "kvferry_quarantined_blocks")

Answering = Callable[..., str]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts one that tells these metrics (name or ``name value``) at a port; returns its URL."""
    with ExitStack() as stack:

        def start(metrics: Sequence[str] = (*IDLE, *HELD), *, port: int = 0) -> str:
            lines = [one if " " in one else f"{one} 0" for one in metrics]
            text = "".join('vllm:{}{{engine="0"}} {}\n'.format(*line.split()) for line in lines)

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.answer(text.encode())

                def do_POST(self) -> None:
                    self.answer(b'{"success": true}')

                def answer(self, body: bytes) -> None:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *words: object) -> None:
                    """Nothing on the terminal."""

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", port), Handler))
            thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start
