"""All faults by name: what is injected, over which transport, in which phase."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.testing.fault_bench import Row
from kvferry.testing.faults import engines, networks, processes, wires

BOTH = ("cma", "mooncake")
Run = Callable[[str, str], Row]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    run: Run
    transport: str
    phase: str

    @property
    def name(self) -> str:
        """``producer_killed:cma:during the write``."""
        return f"{self.run.__name__}:{self.transport}:{self.phase}"

    @property
    def module(self) -> str:
        """Where it is written."""
        return self.run.__module__.rpartition(".")[2]


_PHASES = ("pull waits", "during the write")
_TABLE: tuple[tuple[Run, tuple[str, ...], tuple[str, ...]], ...] = (
    (processes.producer_killed, BOTH, ("before the pull", "pull waits", "during the write", "after the write")),
    (processes.producer_stopped, BOTH, _PHASES),
    (processes.producer_stopped_for_good, ("cma",), ("quarantine not full", "quarantine full")),
    (processes.consumer_killed, BOTH, ("pull waits", "just before publication", "during the write")),
    (processes.consumer_stopped, BOTH, _PHASES),
    (processes.producer_restarts, BOTH, ("with its layout", "with another layout")),
    (processes.consumer_restarts, BOTH, ("with its layout", "with another layout")),
    (
        processes.other_version,
        ("cma",),
        ("producer, minor", "consumer, minor", "producer, major", "consumer, major"),
    ),
    (processes.closed_while_writing, BOTH, ("producer", "consumer")),
    (processes.forked, BOTH, ("fork", "close")),
    (processes.expired, ("cma",), ("nobody pulls", "nobody publishes", "nobody knows it")),
    (processes.withdrawn, ("cma",), ("before the pull", "pull waits")),
    (processes.aborted, BOTH, _PHASES),
    (engines.misbehaves, BOTH, tuple(engines.MISDEEDS)),
    (engines.misbehaves_in_a_crowd, BOTH, ("crowd",)),
    (engines.overfull, BOTH, ("overfull",)),
    (wires.bad_weather, ("cma", "mooncake"), tuple(wires.WEATHERS)),
    (wires.relay_cut, BOTH, _PHASES),
    (
        wires.dead_port,
        ("mooncake",),  # over cma only the writer's own word or end is proof, and it cannot be reached here
        ("bootstrap port closed", "bootstrap port mute", "message port closed", "message port mute"),
    ),
    (wires.abort_storm, BOTH, ("all", "every other")),
    (wires.flood, ("cma",), ("flood",)),
    (wires.nonsense, ("cma",), ("nonsense",)),
    (wires.same_name_twice, ("cma",), ("published twice", "fetched twice")),
    (networks.slow_link, ("mooncake",), ("20mbit", "100mbit")),
    (networks.dead_link, ("mooncake",), ("link down", "black hole")),
)


def catalogue() -> tuple[Fault, ...]:
    """Every fault, in the order of the table."""
    return tuple(
        Fault(run, transport, phase)
        for run, transports, phases in _TABLE
        for transport in transports
        for phase in phases
    )


def unavailable(fault: Fault) -> str | None:
    """Why a fault cannot be tried here; ``None`` when it can."""
    if fault.transport == "mooncake" and importlib.util.find_spec("mooncake") is None:
        return "the Mooncake engine is not installed"
    return networks.missing() if fault.module == "networks" else None


def run_fault(fault: Fault) -> Row:
    """Inject one fault; the row of the table."""
    return fault.run(fault.transport, fault.phase)
