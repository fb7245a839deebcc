"""Checking what a machine claims about itself."""


def holds(condition: bool, claim: str) -> None:
    """Raise ``AssertionError`` with the claim that does not hold: a bug in the machine, never in its input."""
    if not condition:
        raise AssertionError(claim)
