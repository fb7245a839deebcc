"""``python -m kvferry.cli``: the same as the ``kvferry`` command."""

from kvferry.cli.main import main

main()
