"""Every state that a small world of the joined machines can reach, breadth first, with nothing left to chance.

The machines are the real ones, under the drivers of :class:`kvferry.testing.joined.Joined`; how each reacts is worked
out once for each of its states (:mod:`kvferry.testing.explore_parts`), so a world
(:mod:`kvferry.testing.explore_world`) is a handful of small numbers, and the search is quick enough to come to its end.

After each step the promises of ``joined`` and the machines' own invariants are checked, and that no block goes back
while a write that touches it may land. Where nothing can happen any more, everything must have ended and be given back;
and from every state such an end must be within reach.
"""

import argparse
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.testing.explore_world import Budget, SmallWorld, Step

__all__ = ["WORLDS", "Budget", "Explored", "PromiseBrokenError", "SmallWorld", "Step", "explore", "small_world"]


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration came to."""

    states: int
    steps: int
    ends: int
    """States in which nothing can happen any more."""
    depth: int
    parts: int
    """States of single machines."""
    whole: bool
    """Nothing was left out."""
    seconds: float


class PromiseBrokenError(AssertionError):
    """A promise does not hold; the message has the steps that lead there."""


class _Search:
    """Breadth first, with the way to each state."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world
        self.states = [world.first]
        self.numbers = {world.first: 0}
        self._came_from = array("q", [-1])
        self._steps: dict[Step, int] = {}
        self._came_by = array("q", [-1])
        self.sources, self.targets, self.ends = array("q"), array("q"), array("q")
        self.depths = array("i", [0])

    def visit(self, here: int) -> None:
        """Take all steps from one state."""
        state = self.states[here]
        following = self.world.successors(state)
        if not following:
            self.ends.append(here)
            if not self.world.at_peace(state):
                raise self._broken("something has not ended, or is held for ever", here, None)
        for step, after in following:
            if isinstance(after, str):
                raise self._broken(after, here, step)
            number = self.numbers.get(after)
            if number is None:
                number = self.numbers[after] = len(self.states)
                self.states.append(after)
                self._came_from.append(here)
                self._came_by.append(self._steps.setdefault(step, len(self._steps)))
                self.depths.append(self.depths[here] + 1)
            self.sources.append(here)
            self.targets.append(number)

    def check_ends(self) -> None:
        """From every state an end is within reach: nothing goes round for ever."""
        sources, targets = np.frombuffer(self.sources, np.int64), np.frombuffer(self.targets, np.int64)
        reached = np.zeros(len(self.states), bool)
        reached[np.frombuffer(self.ends, np.int64)] = True
        before = -1
        while before != (before := int(reached.sum())):
            reached[sources[reached[targets]]] = True
        if not reached.all():
            raise self._broken("no end is within reach", int(np.flatnonzero(~reached)[0]), None)

    def _broken(self, said: str, here: int, step: Step | None) -> PromiseBrokenError:
        names = list(self._steps)
        path = [] if step is None else [step]
        while here:
            path.append(names[self._came_by[here]])
            here = self._came_from[here]
        story = "\n".join(f"  {name}{more}" for name, more in reversed(path))
        return PromiseBrokenError(f"{said}, after:\n{story}")


def explore(
    world: SmallWorld, *, limit: int = 50_000_000, seconds: float = 1e9, tell: Callable[[str], object] = lambda _: None
) -> Explored:
    """Visit every reachable state, at most ``limit`` of them, for at most so long."""
    began = time.monotonic()
    search = _Search(world)
    here, whole = 0, True
    while here < len(search.states):
        if len(search.states) >= limit or time.monotonic() - began > seconds:
            whole = False
            break
        search.visit(here)
        here += 1
        if here % 50_000 == 0:
            met, depth = len(search.states), search.depths[here - 1]
            tell(f"{here:,} of {met:,} states, depth {depth}, {time.monotonic() - began:.0f} s")
    if whole:
        search.check_ends()
    return Explored(
        states=len(search.states),
        steps=len(search.sources),
        ends=len(search.ends),
        depth=max(search.depths),
        parts=len(world.parts.locals),
        whole=whole,
        seconds=time.monotonic() - began,
    )


WORLDS: dict[str, tuple[int, int, Budget]] = {
    "two requests, one crash": (2, 2, Budget(crashes=1)),
    "two requests, the consumer dies": (2, 2, Budget(deaths=1)),
    "two requests, a crash and the consumer dies": (2, 2, Budget(crashes=1, deaths=1)),
    "two requests, two crashes": (2, 2, Budget(crashes=2)),
    "two requests, one crash and one lost message": (2, 2, Budget(crashes=1, losses=1)),
    "two requests, one crash and one repeated message": (2, 2, Budget(crashes=1, repeats=1)),
    "two requests, one crash and one abort": (2, 2, Budget(crashes=1, aborts=1)),
    "two requests, one crash and one lie": (2, 2, Budget(crashes=1, lies=1)),
    "two requests, one lie and the consumer dies": (2, 2, Budget(lies=1, deaths=1)),
    "two requests, one crash and a fence that proves nothing": (2, 2, Budget(crashes=1, vain_fences=1)),
    "one request, one broken connection, a fence that proves nothing": (2, 1, Budget(cuts=1, vain_fences=1)),
    "two requests, one crash that leaves bytes under way": (2, 2, Budget(crashes=1, landings=1)),
    "two requests, one abort, one crash that leaves bytes under way": (2, 2, Budget(aborts=1, crashes=1, landings=1)),
    "one request, one lie, one hurry, bytes outlive their writer": (2, 1, Budget(lies=1, hurries=1, landings=1)),
    "one request, one crash, one lie, one hurry, bytes outlive their writer twice": (
        2,
        1,
        Budget(crashes=1, lies=1, hurries=1, landings=2),
    ),
    "one producer, two requests, one lie, one hurry, bytes outlive their writer": (
        1,
        2,
        Budget(lies=1, hurries=1, landings=1),
    ),
    "one producer, two requests, one crash": (1, 2, Budget(crashes=1)),
    "one request, one crash, one lie": (2, 1, Budget(crashes=1, lies=1)),
    "one request, one lost and one repeated message": (2, 1, Budget(losses=1, repeats=1)),
    "one request, one abort and one broken connection": (2, 1, Budget(aborts=1, cuts=1)),
    "one request, one hurry and one failure": (2, 1, Budget(hurries=1, failures=1)),
    "one request, one crash, one lie, one hurry": (2, 1, Budget(crashes=1, lies=1, hurries=1)),
    "one request, one lie, one hurry, the consumer dies": (2, 1, Budget(lies=1, hurries=1, deaths=1)),
}
"""Producer ranks, requests, bad luck."""


def small_world(name: str) -> SmallWorld:
    """One of the worlds, at its beginning."""
    producers, requests, budget = WORLDS[name]
    return SmallWorld(producers=producers, requests=requests, budget=budget)


def main() -> int:
    parser = argparse.ArgumentParser(description="Explore small worlds of the protocol exhaustively.")
    parser.add_argument("--only", default="", help="worlds whose name contains this")
    parser.add_argument("--limit", type=int, default=50_000_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="for each world")
    chosen = parser.parse_args()
    complete = True
    for name in [one for one in WORLDS if chosen.only in one]:
        found = explore(
            small_world(name),
            limit=chosen.limit,
            seconds=chosen.seconds,
            tell=lambda line: sys.stderr.write(line + "\n"),
        )
        complete &= found.whole
        said = "all of them" if found.whole else "not all: cut off"
        sys.stdout.write(
            f"{name}: {found.states:,} states ({said}), {found.steps:,} steps, {found.ends} ends, "
            f"depth {found.depth}, {found.seconds:.0f} s\n"
        )
    return 0 if complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
