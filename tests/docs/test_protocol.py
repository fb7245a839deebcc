"""The protocol page is what the machines run on."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_protocol_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_protocol_page.py"), "--check"], timeout=60, check=False
    )
    assert done.returncode == 0, "run scripts/make_protocol_page.py"
