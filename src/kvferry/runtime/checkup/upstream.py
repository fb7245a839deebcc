"""What is declared of an engine under vLLM's own connector, held against what that engine tells of itself.

Its pulls do not show the size of its blocks or the type of its cache; the metrics page of its API server does. So an
operator can let it say what to declare, before a wrong declaration gives a wrong answer.
"""

import json
from collections.abc import Mapping
from typing import Final

from kvferry.control import read_cache_info
from kvferry.errors import RemoteProtocolError
from kvferry.runtime.checkup.records import Finding, Verdict
from kvferry.runtime.upstream_caches import Declared

_LABELS: Final = {"block_size": "block_size", "cache_dtype": "cache_dtype", "layout": "kv_cache_layout"}
"""Of what can be declared, the label that tells it."""

_UNTOLD: Final = ("", "None", "auto")
"""Labels that leave it open: a cache type of ``auto`` is the model's own."""


def check_upstream(url: str, declared: Declared, *, ca: str | None = None) -> Finding:
    """Whether the declaration is what the engine at ``url`` says."""
    name = f"upstream peer at {url}"
    try:
        told = [told_by(labels) for labels in read_cache_info(url, ca=ca)]
    except RemoteProtocolError as error:
        return Finding.of_error(name, error)
    if any(one != told[0] for one in told):
        return Finding(name, Verdict.FAILED, f"its engines differ: {told}; one declaration is for all of them")
    return compare(name, told[0], declared)


def told_by(labels: Mapping[str, str]) -> dict[str, int | str]:
    """What the labels say of it, in the words of the option ``upstream_peer``."""
    found = {known: labels.get(label, "") for known, label in _LABELS.items()}
    return {
        known: int(value) if known == "block_size" and value.isdecimal() else value
        for known, value in found.items()
        if value not in _UNTOLD
    }


def compare(name: str, told: Mapping[str, int | str], declared: Declared) -> Finding:
    """A declaration that contradicts the engine fails; one that leaves out what it tells is worth completing."""
    stated = {known: getattr(declared, known) for known in told}
    wrong = [known for known in told if stated[known] not in (None, told[known])]
    said = ", ".join(f"{known} {value}" for known, value in told.items()) or "nothing that can be declared"
    advice = f'declare "upstream_peer": {json.dumps(dict(told))} in kv_connector_extra_config'
    facts = {"told": dict(told), "declared": {known: value for known, value in stated.items() if value is not None}}
    if wrong:
        other = ", ".join(f"{known} {stated[known]}" for known in wrong)
        return Finding(name, Verdict.FAILED, f"it has {said}; declared is {other}", advice, facts)
    if None in stated.values():
        return Finding(name, Verdict.NOTE, f"it has {said}", advice, facts)
    return Finding(name, Verdict.OK, f"it has {said}, as declared" if told else f"it tells {said}", facts=facts)
