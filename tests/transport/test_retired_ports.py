"""A writer in doubt knows two ports of the engine that was destroyed: no later engine of this process takes them.

Where one did, a minute later (until then the kernel keeps them), a second write of the old writer arrived in the memory
of the new engine: tried by hand with Mooncake 0.3.13, and too slow for a test. An engine reads its range once in a
process, so the test has a process of its own, with a narrow range.
"""

import socket
import subprocess
import sys
import textwrap

import pytest

from kvferry.testing.ports import free_ports
from kvferry.transport.listening import listening_ports, taken

PREAMBLE = """
from kvferry.errors import TransportError
from kvferry.transport import MooncakeTransport

def ports(engine):
    return set(engine._engine.ports)
"""


def in_a_range(size: int, body: str) -> str:
    """What a process prints whose engines have so many ports to choose from."""
    first = free_ports(size)
    code = PREAMBLE + textwrap.dedent(body)
    environment = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(first + size - 1)}
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.update({environment!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_listening_socket_is_seen_while_it_listens() -> None:
    before = listening_ports()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        new = {server.getsockname()[1], six.getsockname()[1]}
        assert listening_ports() - before == new
        with socket.create_connection(server.getsockname()):
            assert listening_ports() - before == new, "the two ends of a connection do not listen"
    assert not listening_ports() & new


def test_a_port_is_taken_for_a_while_also_where_somebody_listens_already() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, other = server.getsockname()[1], free_ports(1)
        with taken({port, other}):
            assert {port, other} <= listening_ports()
            with pytest.raises(OSError, match="in use"), socket.create_server(("", other)):
                pass
        assert listening_ports() & {port, other} == {port}
    with socket.create_server(("", other)):
        pass


@pytest.mark.mooncake
def test_when_no_port_is_left_the_error_says_what_to_do_and_nothing_else_is_lost() -> None:
    pytest.importorskip("mooncake.engine")
    body = """
    first = MooncakeTransport("127.0.0.1")
    known = ports(first)
    print(len(known))
    first.retire()
    first.close()
    first.retire()
    for attempt in range(3):
        other = MooncakeTransport("127.0.0.1")
        print(len(ports(other) & known))
        other.close()
    other = MooncakeTransport("127.0.0.1")
    other.retire()
    other.close()
    for attempt in range(2):
        try:
            MooncakeTransport("127.0.0.1")
        except TransportError as error:
            print(error)
    """
    *others, refused, again = in_a_range(4, body).splitlines()
    assert others == ["2", "0", "0", "0"]
    assert refused == again
    assert "the engine refused to start" in refused
    assert "4 ports are not used again in this process" in refused
    assert "a wider range for MC_MIN_RPC_PORT and MC_MAX_RPC_PORT, or a restart of this process, makes room" in refused
