"""A fleet moves from vLLM's own connector to kvferry, process by process, under load: ``make rolling-upgrade``.

Two prefill and two decode engines, real ``vllm serve`` (a tiny Qwen3 in float32, Mooncake over TCP), nothing forked,
behind ``kvferry serve-router``. What is done and judged: :mod:`kvferry.testing.rolling_upgrade`.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kvferry.testing.engines import warm_forge
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.rolling_upgrade import Upgrade, upgrade


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--answers", type=int, default=40, help="between two replacements, at the least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drain", type=int, default=0, help="seconds that a process has to finish what it has begun")
    parser.add_argument("--forked", action="store_true", help="fork processes from one that has imported vLLM")
    parser.add_argument("--folder", type=Path, help="where logs and reports stay; a temporary one by default")
    chosen = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        how = Upgrade(
            build_model(QWEN3, folder),
            folder,
            clients=chosen.clients,
            answers=chosen.answers,
            seed=chosen.seed,
            drain=chosen.drain,
            forge=stack.enter_context(warm_forge(folder / "forge.log")) if chosen.forked else None,
        )
        rolled = upgrade(how)
    print(f"{rolled}; {time.monotonic() - began:.0f} s in all")
    print(*(f"  with its own process: {one}" for one in rolled.own), sep="\n")
    print(*(f"  FAULT: {one}" for one in rolled.faults), sep="\n")
    return 1 if rolled.faults else 0


if __name__ == "__main__":
    sys.exit(main())
