"""What an embedding engine holds: whatever goes wrong in closing it, its thread ends."""

import pytest

from kvferry.runtime.loop import LoopThread
from kvferry.runtime.service import _closed


def test_the_thread_ends_also_where_closing_fails() -> None:
    thread = LoopThread("closing")

    async def stop() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        _closed(thread, lambda: None, stop)
    assert not thread._thread.is_alive()
    assert _closed(thread, lambda: None, stop) is False
