"""Which consumer ranks pull from which producer ranks: the same rule at both ends.

A consumer rank pulls from every producer rank that the plan pairs it with. A producer rank that no consumer needs
(a replica that was not chosen) still holds blocks and must hear that it may let go: one consumer rank, the same by
both ends' count, sends it a pull that asks for nothing.
"""

from kvferry.plan import Plan


def targets_of(plan: Plan, consumer: int) -> dict[int, bool]:
    """The producer ranks that ``consumer`` pulls from, each with whether there is anything to fetch."""
    pairs = set(plan.pairs())
    used = {producer for producer, _ in pairs}
    targets: dict[int, bool] = {}
    for producer in range(len(plan.producers)):
        if (producer, consumer) in pairs:
            targets[producer] = True
        elif producer not in used and producer % len(plan.consumers) == consumer:
            targets[producer] = False
    return targets


def pulls_expected(plan: Plan, producer: int) -> int:
    """How many consumer ranks will pull from ``producer``; at least one."""
    return max(1, sum(one == producer for one, _ in plan.pairs()))
