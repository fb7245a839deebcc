"""The metrics page is what the source says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_metrics_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_metrics.py"), "--check"], timeout=60, check=False
    )
    assert done.returncode == 0, "run scripts/make_metrics.py"
