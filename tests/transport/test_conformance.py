"""All three transports pass the suite that ships."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.transport_benches import MemoryBench, ProcessBench, cma_bench, mooncake_bench
from kvferry.testing.transport_conformance import TransportConformance


class TestMemory(TransportConformance):
    @pytest.fixture
    def bench(self) -> MemoryBench:
        return MemoryBench()


class TestCma(TransportConformance):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[ProcessBench]:
        bench = cma_bench(tmp_path)
        yield bench
        bench.end()


@pytest.mark.mooncake
class TestMooncake(TransportConformance):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[ProcessBench]:
        pytest.importorskip("mooncake")
        bench = mooncake_bench(tmp_path)
        yield bench
        bench.end()
