"""Direct or staged: which form of a transfer is cheaper, by what each transport was measured to cost.

The staged form is planned and costed; the transports of one process and one host execute it in tests, and the connector
does not take it yet. So this says what would be gained, not what happens.
"""

from kvferry.plan import Descriptors
from kvferry.plan.staging import choose
from kvferry.transport.costs import COSTS

NETWORK = "mooncake"
"""The transport of the short answer: the only one here whose descriptors are dear."""


def cheaper_form(descriptors: Descriptors) -> str:
    """``direct`` or ``staged``, over the network transport."""
    return choose(descriptors, COSTS[NETWORK]).form


def form_lines(descriptors: Descriptors) -> list[str]:
    """The choice for each transport, with the seconds that decide it."""
    return [f"over {name}: {choose(descriptors, costs)}" for name, costs in COSTS.items()]
