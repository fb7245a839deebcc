"""Faults, each a function that injects one into real processes and returns a row for the table in the docs.

``catalogue()`` names them all; ``scripts/faults.py`` runs them and writes ``docs/faults.md``, the tests run a few.
"""

from kvferry.testing.faults.catalogue import Fault, catalogue, run_fault

__all__ = ["Fault", "catalogue", "run_fault"]
