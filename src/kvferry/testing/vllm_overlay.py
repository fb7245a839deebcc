"""A release of vLLM for which there is no CPU build: its own Python over the compiled files of the installed vLLM.

What a connector meets of vLLM is Python: scheduler, workers, block pool, cache groups, the connectors beside it. The
compiled part is arithmetic, and changes less. So an *overlay* is a folder with the release's wheel without its compiled
files, the compiled files of the vLLM for the CPU that is installed, and metadata that name it ``vllm RELEASE+cpu``.
Where the folder comes first on ``PYTHONPATH``, it is what ``import vllm`` finds; all else is the environment as it is.

Engines of such an overlay show that kvferry works with the release's Python. They show nothing of the release's own
kernels, nor of the versions of torch and other packages that it asks for.

``make test-release RELEASE=0.33.0`` makes one in ``build`` and runs the tests of real engines over it.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.testing.vllm_contract import fetch_wheel

COMPILED: Final = (".so", ".pyd")
_PREFIX: Final = "vllm-"
_COMPLETE: Final = ".complete"


@dataclass(frozen=True, slots=True)
class Overlay:
    """A folder to put first on ``PYTHONPATH``."""

    folder: Path
    release: str

    @property
    def environment(self) -> Mapping[str, str]:
        """For a process that is to import this release."""
        others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        return {"PYTHONPATH": os.pathsep.join([str(self.folder.absolute()), *others])}


def make_overlay(root: Path, release: str, *, wheel: Path | None = None, installed: Path | None = None) -> Overlay:
    """The overlay of ``release`` below ``root``; made where it is not there yet.

    ``wheel``: of the release, else fetched. ``installed``: the package whose compiled files are used, else vLLM's.
    """
    folder = root / f"{_PREFIX}{release}"
    if (folder / _COMPLETE).exists():
        return Overlay(folder, release)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-overlay-") as place:
        _unpack(wheel or fetch_wheel(release, Path(place)), folder, release)
    _copy_compiled(installed or _installed_package(), folder / "vllm")
    (folder / _COMPLETE).touch()
    return Overlay(folder, release)


def overlays(root: Path) -> Iterator[Overlay]:
    """Those that are ready below ``root``, the oldest release first."""
    ready = {path.parent.name.removeprefix(_PREFIX): path.parent for path in root.glob(f"{_PREFIX}*/{_COMPLETE}")}
    for release in sorted(ready, key=lambda name: tuple(int(part) for part in re.findall(r"\d+", name))):
        yield Overlay(ready[release], release)


def installed_release() -> str:
    """Of the vLLM that this interpreter would import."""
    return importlib.metadata.version("vllm").split("+")[0]


def _installed_package() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def _unpack(wheel: Path, folder: Path, release: str) -> None:
    """All but what was compiled; the metadata under the name that vLLM looks for on a CPU."""
    old, new = f"{_PREFIX}{release}.dist-info/", f"{_PREFIX}{release}+cpu.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((*COMPILED, "/RECORD")):
                continue
            archive.extract(name, folder)
    (folder / old).rename(folder / new)
    metadata = folder / new / "METADATA"
    text = metadata.read_text()
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {release}+cpu", text, count=1))


def _copy_compiled(package: Path, into: Path) -> None:
    for path in package.rglob("*"):
        if path.suffix in COMPILED:
            target = into / path.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def main() -> None:
    """``python -m kvferry.testing.vllm_overlay FOLDER RELEASE``: make it, print where it is."""
    root, release = Path(sys.argv[1]), sys.argv[2]
    sys.stdout.write(f"{make_overlay(root, release).folder.absolute()}\n")


if __name__ == "__main__":
    main()
