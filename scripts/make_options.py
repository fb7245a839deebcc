"""Write ``docs/options.md`` from the fields of :class:`kvferry.vllm.config.Config` and the text under each.

python scripts/make_options.py           write the page
python scripts/make_options.py --check   exit 1 when the page is not what would be written
"""

import ast
import inspect
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from kvferry.vllm import config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"

HEAD = """# Options of FerryConnector

They go into `kv_connector_extra_config` of `--kv-transfer-config`. A key that is not listed here is refused at start-up
with the nearest name; a value of the wrong type or range is refused with both. Times are seconds. Roles, ranks and
`kv_load_failure_policy` are vLLM's own options.

This page is written by `scripts/make_options.py` from the source.

| option | default | meaning |
|---|---|---|
"""


def texts() -> dict[str, str]:
    """The string that stands under each field of the class."""
    body = ast.parse(inspect.getsource(config.Config)).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError("Config is not a class")
    found: dict[str, str] = {}
    last = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = " ".join(str(node.value.value).split()).replace("``", "`")
    return found


def page() -> str:
    """The whole page."""
    said = texts()
    hints = get_type_hints(config.Config)
    rows = []
    for option in fields(config.Config):
        default = "none" if option.default in (None, MISSING) else f"`{option.default!r}`".replace("'", '"')
        several = get_args(hints[option.name]) if get_origin(hints[option.name]) is Literal else ()
        choices = f" One of {', '.join(f'`{choice}`' for choice in several)}." if len(several) > 1 else ""
        rows.append(f"| `{option.name}` | {default} | {said[option.name]}{choices} |")
    ignored = [f"| `{name}` | | Accepted and without effect: {why}. |" for name, why in config.IGNORED.items()]
    return HEAD + "\n".join([*rows, *ignored]) + "\n"


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
