"""The stream on which two processes agree about a marker page: one JSON record a line, or a reason why not."""

import json
import socket
from typing import Any, Final

from kvferry.errors import TransportError, TransportReason

TIMEOUT: Final = 30.0
"""For one line of the other side."""
_LONGEST_LINE: Final = 4096


class Line:
    """The stream between the two."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(TIMEOUT)
        self._stream = stream
        self._reader = stream.makefile("rb")

    def say(self, **message: Any) -> None:
        """Send one line."""
        try:
            self._stream.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise _lost(error) from error

    def hear(self) -> dict[str, Any]:
        """The next line; raises what the other side says went wrong."""
        try:
            data = self._reader.readline(_LONGEST_LINE)
        except OSError as error:
            raise _lost(error) from error
        try:
            message = json.loads(data)
        except ValueError as error:
            said = "it hung up" if not data else "it does not speak as 'kvferry doctor --serve' does"
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"no answer of the other side: {said}") from error
        if not isinstance(message, dict):
            raise TransportError(TransportReason.PEER_UNREACHABLE, "the other side sends something else than a record")
        if "reason" in message:
            reason, known = str(message["reason"]), {one.value for one in TransportReason}
            said = f"the other side says: {str(message.get('said', ''))[:500]}"
            raise TransportError(TransportReason(reason) if reason in known else TransportReason.ENGINE_FAULT, said)
        return message

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self._stream.close()


def _lost(error: OSError) -> TransportError:
    return TransportError(TransportReason.PEER_UNREACHABLE, f"the connection to the other side is lost ({error})")
