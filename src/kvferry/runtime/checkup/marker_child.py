"""The child of :func:`kvferry.runtime.checkup.marker.deliver_to_self`: writes a marker page into its parent.

``python -m kvferry.runtime.checkup.marker_child FD WAY``; it ends with TOLD after the parent was told why.
"""

import json
import socket
import sys

from kvferry.errors import TransportError
from kvferry.runtime.checkup.line import Line
from kvferry.runtime.checkup.marker import TOLD, Way, write_marker


def main() -> int:
    """Write, and hang up."""
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    try:
        write_marker(line, Way(*json.loads(sys.argv[2])))
    except TransportError:
        return TOLD
    finally:
        line.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
