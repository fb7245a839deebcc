"""A writer in doubt knows two ports of the engine that was destroyed: no later engine on this host takes them.

Where one did, a minute later (until then the kernel keeps them), a second write of the old writer arrived in the memory
of the new engine: tried by hand with Mooncake 0.3.13, and too slow for a test. An engine reads its range once in a
process, so the test has a process of its own, with a narrow range.
"""

import contextlib
import socket
import subprocess
import sys
import textwrap

import pytest

from kvferry.testing.ports import free_ports
from kvferry.transport.listening import Kept, listening_ports, taken

PREAMBLE = """
import subprocess
import sys

from kvferry.errors import TransportError
from kvferry.transport import MooncakeTransport

def ports(engine):
    return set(engine._engine.ports)

def attempt():
    try:
        engine = MooncakeTransport("127.0.0.1")
    except TransportError as error:
        print(error)
    else:
        print(len(ports(engine)))
        engine.close()

def elsewhere():
    # The attempt of another process, whose engines have the same ports to choose from.
    command = [sys.executable, "-c", PREAMBLE + "attempt()"]
    print(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout, end="")
"""


def in_a_range(size: int, body: str) -> str:
    """What a process prints whose engines have so many ports to choose from."""
    first = free_ports(size)
    environment = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(first + size - 1)}
    preamble = f"import os; os.environ.update({environment!r})\n{PREAMBLE}"
    done = subprocess.run(
        [sys.executable, "-c", f"{preamble}\nPREAMBLE = {preamble!r}\n{textwrap.dedent(body)}"],
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


@pytest.mark.parametrize("shared", [0, 1], ids=["alone", "to be shared"])
def test_a_port_that_is_kept_is_nobody_elses_and_refuses_who_connects(shared: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.close()  # so that its connection waits on this side, as those of an engine do
        client.close()
    with contextlib.closing(Kept()) as kept:
        kept.keep({port})
        kept.keep({port})
        refuses(port, shared=shared)
    with socket.create_server(("", port)):
        pass


def refuses(port: int, *, shared: int) -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "")):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            with pytest.raises(OSError, match="in use"):
                other.bind((host, port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.mooncake
def test_another_process_of_the_host_does_not_take_them_either() -> None:
    pytest.importorskip("mooncake.engine")
    body = """
    for _ in range(2):
        mine = MooncakeTransport("127.0.0.1")
        mine.retire()
        mine.close()
        elsewhere()
    """
    some, refused = in_a_range(4, body).splitlines()
    assert some == "2", "of four ports two are left"
    assert "the engine refused to start" in refused


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
