"""An overlay of a made-up release over a made-up installation."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvferry.testing.vllm_overlay import make_overlay, overlays


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-9.10.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "IS = 'the new release'")
        archive.writestr("vllm/_C.abi3.so", "compiled for an accelerator")
        archive.writestr("vllm-9.10.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.10.0\n")
        archive.writestr("vllm-9.10.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    package = tmp_path / "installed" / "vllm"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("IS = 'installed'")
    (package / "_C.abi3.so").write_text("compiled for the CPU")
    (package / "inner" / "more.so").write_text("more")
    return package


def test_python_is_the_releases_and_what_is_compiled_is_the_installed_ones(
    tmp_path: Path, wheel: Path, installed: Path
) -> None:
    made = make_overlay(tmp_path / "build", "9.10.0", wheel=wheel, installed=installed)
    assert (made.folder / "vllm" / "_C.abi3.so").read_text() == "compiled for the CPU"
    assert (made.folder / "vllm" / "inner" / "more.so").exists()
    asked = "import vllm; from importlib.metadata import version; print(vllm.IS, version('vllm'))"
    said = subprocess.run([sys.executable, "-c", asked], env=dict(made.environment), capture_output=True, check=True)
    assert said.stdout.decode().strip() == "the new release 9.10.0+cpu"


def test_it_is_made_once_and_a_half_made_one_is_made_again(tmp_path: Path, wheel: Path, installed: Path) -> None:
    root = tmp_path / "build"
    (root / "vllm-9.10.0" / "vllm").mkdir(parents=True)
    (root / "vllm-9.10.0" / "vllm" / "left over").touch()
    assert list(overlays(root)) == []
    first = make_overlay(root, "9.10.0", wheel=wheel, installed=installed)
    assert not (first.folder / "vllm" / "left over").exists()
    wheel.unlink()
    assert make_overlay(root, "9.10.0", wheel=wheel, installed=installed) == first


def test_overlays_are_listed_by_age(tmp_path: Path) -> None:
    for release in ("9.10.0", "9.9.0", "10.0.0"):
        (tmp_path / f"vllm-{release}").mkdir()
        (tmp_path / f"vllm-{release}" / ".complete").touch()
    (tmp_path / "vllm-11.0.0").mkdir()
    assert [one.release for one in overlays(tmp_path)] == ["9.9.0", "9.10.0", "10.0.0"]
