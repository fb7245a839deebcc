"""What engines write to standard error by themselves: kept away from people, unless something went wrong.

The Mooncake engine says of an engine that works that it does not, from C++ and before its own log level counts. So the
file descriptor itself is turned aside; children inherit that.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO


@contextmanager
def engine_noise() -> Iterator[StringIO]:
    """Keep standard error of this process and its children; afterwards it stands in what was given.

    An exception that leaves the block lets it all out first: a child's traceback may be in it.
    """
    sys.stderr.flush()
    kept, noise = os.dup(2), StringIO()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield noise
        except BaseException:
            os.dup2(kept, 2)
            file.seek(0)
            os.write(2, file.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            noise.write(file.read().decode(errors="replace"))
