"""What each transport costs, so that a plan can say whether it had better be staged.

Medians of five runs of ``make bench-costs`` on 2026-11-30: AMD EPYC, 2 shared cores, Linux 6.18, Python 3.11.7, NumPy
2.3.5, mooncake-transfer-engine-non-cuda 0.3.13.post1 over TCP on the loopback interface; load 0.6 to 0.9. Per
descriptor the runs lie within 12 % of the median for memory and mooncake, within 30 % for cma; per byte within 25 % for
cma and 50 % for mooncake. What decides is far larger: a descriptor of the Mooncake engine costs as much as the copy of
42 runs in memory. Other links (RDMA, a real network) are not in here: measure there.
"""

from collections.abc import Mapping
from types import MappingProxyType

from kvferry.plan.staging import CostModel
from kvferry.transport.cma import CmaTransport
from kvferry.transport.memory import MemoryTransport
from kvferry.transport.mooncake import MAX_ROW_BYTES, MooncakeTransport

_GAMMA, _DELTA, _STEP = 0.0556e-9, 0.649e-6, 0.357e-3
"""A copy inside one process, by the cma transport: what gather and scatter cost wherever the bytes go between them."""


def _model(alpha: float, beta: float) -> CostModel:
    return CostModel(alpha=alpha, beta=beta, gamma=_GAMMA, delta=_DELTA, chunk=MAX_ROW_BYTES, step=_STEP)


COSTS: Mapping[str, CostModel] = MappingProxyType(
    {
        MemoryTransport.name: _model(0.615e-6, 0.0298e-9),
        CmaTransport.name: _model(0.668e-6, 0.1107e-9),
        MooncakeTransport.name: _model(27.27e-6, 0.2180e-9),
    }
)
"""By name of the transport; ``mooncake`` as it is over TCP."""
