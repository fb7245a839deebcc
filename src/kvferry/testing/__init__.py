"""What ships for tests, demos and experiments: oracle, conformance suites, tiny models, engines in processes.

Imports every other room and is imported by none of them (the ``demo`` command apart).
"""
