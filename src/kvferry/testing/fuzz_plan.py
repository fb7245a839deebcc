"""Seeded cases against a planner, held to the oracle: ``python -m kvferry.testing.fuzz_plan --count 100000``.

Case n is ``random_case(random.Random(n))``, so a run is resumed with ``--start`` and a failure is named by its seed. A
table says how often each feature of the contract occurred. The first failures are made smaller and printed as JSON.
With ``--morphed`` each case is then changed into what that function does not draw (``case_morphs``).
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.errors import PlanError
from kvferry.testing.case_features import EVERY, features_of
from kvferry.testing.case_model import Json
from kvferry.testing.case_morphs import morph
from kvferry.testing.oracle import expect, judge
from kvferry.testing.strategies import Case, random_case

Planner = Callable[[list[Json], list[Json], Json], Json]
"""(producers, consumers, request) -> the plan, or ``{"error": {"reason": ..., "message": ...}}``."""


@dataclass(slots=True)
class Failure:
    seed: int
    violations: list[str]
    case: Case


@dataclass(slots=True)
class Report:
    count: int = 0
    features: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def table(self) -> str:
        """Each feature and how often it occurred; rarer than one in a hundred is marked."""
        lines = []
        for name in EVERY:
            percent = 100 * self.features[name] / max(1, self.count)
            lines.append(f"{percent:6.1f} %  {name}{'' if percent >= 1 else '   <-- below 1 %'}")
        return "\n".join(lines)

    def rare(self) -> list[str]:
        return [name for name in EVERY if 100 * self.features[name] < self.count]


def kvferry_planner(producers: list[Json], consumers: list[Json], request: Json) -> Json:
    """The planner that ships, as the command calls it."""
    from kvferry.cli.plan import plan_dicts

    try:
        return dict(plan_dicts(producers, consumers, request))
    except PlanError as refusal:
        return {"error": {"reason": refusal.reason.value, "message": refusal.message}}


def violations_of(planner: Planner, case: Case, *, strict: bool = False, report: Report | None = None) -> list[str]:
    """What the oracle has against the planner's answer."""
    expected = expect(case.producers, case.consumers, case.request)
    if report is not None:
        found = features_of(case.producers, case.consumers, case.request, expected=expected)
        report.features.update(found)
    try:
        answer = planner(case.producers, case.consumers, case.request)
    except Exception as crash:  # noqa: BLE001 - whatever it raises is a finding
        return [f"raised {type(crash).__name__}: {crash}"]
    return judge(expected, answer, strict=strict)


def morphed_case(rng: random.Random) -> Case:
    """A case as ``random_case`` never draws it."""
    case = random_case(rng)
    while case.fault is not None:
        case = random_case(rng)
    morph(case, rng)
    return case


def fuzz(
    planner: Planner,
    seeds: range,
    *,
    strict: bool = False,
    most_failures: int = 5,
    draw: Callable[[random.Random], Case] = random_case,
) -> Report:
    report = Report()
    for seed in seeds:
        case = draw(random.Random(seed))
        try:
            violations = violations_of(planner, case, strict=strict, report=report)
        except Exception as error:
            error.add_note(f"the oracle itself failed, at seed {seed}")
            raise
        report.count += 1
        if violations:
            report.failures.append(Failure(seed, violations, case))
            if len(report.failures) >= most_failures:
                break
        if report.count % 1000 == 0:
            sys.stderr.write(f"{report.count} cases, {len(report.failures)} failures, next seed {seed + 1}\n")
    return report


# ------------------------------------------------------------------------------------------------------ making smaller


def shrink(planner: Planner, failure: Failure, *, strict: bool = False, tries: int = 400) -> Failure:
    """A smaller case with the same kind of violation."""
    best = failure
    kind = _kind(failure.violations)
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _smaller(best.case):
            tries -= 1
            violations = violations_of(planner, smaller, strict=strict)
            if violations and _kind(violations) == kind:
                best, progress = Failure(failure.seed, violations, smaller), True
                break
            if tries <= 0:
                break
    return best


def _kind(violations: list[str]) -> str:
    """The first violation without its numbers and names."""
    return "".join(c for c in violations[0] if not c.isdigit())[:34]


def _smaller(case: Case) -> Iterator[Case]:
    for side in ("producers", "consumers"):
        for index in range(len(getattr(case, side))):
            if len(getattr(case, side)) > 1:
                smaller = case.copy()
                del getattr(smaller, side)[index]
                yield smaller
    files = [*case.producers, *case.consumers]
    keys = sorted({(str(p["layer"]), str(p["component"])) for f in files for p in f.get("components", [])})
    for key in keys:
        smaller = case.copy()
        for file in [*smaller.producers, *smaller.consumers]:
            file["components"] = [p for p in file["components"] if (p["layer"], p["component"]) != key]
        yield smaller
    yield from _smaller_tables(case)


def _smaller_tables(case: Case) -> Iterator[Case]:
    for side in ("producer", "consumer"):
        for index, table in enumerate(case.request.get(side, [])):
            for entry, block in enumerate(table.get("blocks", [])):
                if block is not None:
                    smaller = case.copy()
                    smaller.request[side][index]["blocks"][entry] = None
                    yield smaller
            if len(table.get("blocks", [])) > 1:
                smaller = case.copy()
                smaller.request[side][index]["blocks"].pop()
                yield smaller
    for name, step in (("stop", -1), ("start", 1)):
        smaller = case.copy()
        if isinstance(smaller.request.get("tokens", {}).get(name), int):
            smaller.request["tokens"][name] += step
            yield smaller


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="hold the planner to the oracle over seeded random cases")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--strict", action="store_true", help="replica k mod n also where producers overlap in part")
    parser.add_argument("--morphed", action="store_true", help="change each case into what is not drawn else")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.start, chosen.start + chosen.count)
    draw = morphed_case if chosen.morphed else random_case
    report = fuzz(kvferry_planner, seeds, strict=chosen.strict, most_failures=chosen.failures, draw=draw)
    lines = [report.table()]
    for failure in report.failures:
        small = shrink(kvferry_planner, failure, strict=chosen.strict)
        lines.append(f"\nseed {failure.seed} ({failure.case.fault or 'no fault put in'}):")
        lines += [f"  {violation}" for violation in small.violations[:6]]
        lines.append(small.case.to_json())
    lines.append(f"\n{report.count} cases from seed {chosen.start}: {len(report.failures)} failures")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
