"""Choices and findings: what a checkup is made of, and how it is put into words and into JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.errors import FerryError


class Verdict(StrEnum):
    """What a finding means for a deployment with these settings."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing to do."""
    SKIPPED = "skipped"
    """Not looked at, with the reason."""
    WARNING = "warning"
    """It will run; somebody should read this."""
    FAILED = "failed"
    """It will not run like this."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting as it comes out."""

    name: str
    value: str
    why: str
    """Who says so: an option, a variable, what was detected, or the default."""

    def __str__(self) -> str:
        return f"{self.name} {self.value} ({self.why})"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at."""

    name: str
    verdict: Verdict
    said: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, for ``--json``."""

    @classmethod
    def of_error(cls, name: str, error: FerryError, *, verdict: Verdict = Verdict.FAILED) -> "Finding":
        """A refusal as a finding."""
        return cls(name, verdict, error.message, facts={"reason": error.reason.value})

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.verdict.value}: {self.name}: {self.said}{advice}"


@dataclass(frozen=True, slots=True)
class Checkup:
    """All of it."""

    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing failed."""
        return all(finding.verdict is not Verdict.FAILED for finding in self.findings)

    def lines(self) -> Iterator[str]:
        """For people, one fact a line."""
        for choice in self.choices:
            yield str(choice)
        for finding in self.findings:
            yield str(finding)

    def to_json(self) -> dict[str, Any]:
        """For programs; the names never change their spelling."""
        return {
            "sound": self.sound,
            "choices": {one.name: {"value": one.value, "why": one.why} for one in self.choices},
            "findings": [
                {
                    "name": one.name,
                    "verdict": one.verdict.value,
                    "said": one.said,
                    "advice": one.advice,
                    "facts": dict(one.facts),
                }
                for one in self.findings
            ],
        }
