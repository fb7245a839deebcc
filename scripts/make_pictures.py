"""Make the pictures of ``docs/inspect.md``: example layouts, and the commands that draw them.

``python scripts/make_pictures.py`` draws them again. With ``--layouts FOLDER`` the layouts and the request that they
are drawn from are left in FOLDER, so that every command of the page can be repeated.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from kvferry.layout import Component, Content, Group, Layout, Region, encode_layout
from kvferry.plan import BlockTable, TransferRequest, encode_request
from kvferry.testing.commands import call
from kvferry.testing.layouts import page, state, worker

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"

HYBRID_STRIDE = 12 * 73_728
"""One block of 768 tokens: twelve kernel blocks of 64."""

SECTIONS = (("conv.q", 2048, 6), ("conv.k", 2048, 6), ("conv.v", 4096, 6), ("ssm", 16, 32_768))
"""Sections of a state: name, channels of a rank, bytes of a channel."""

COMMANDS = {
    "hybrid.svg": ("inspect", "hybrid.json", "--svg", "hybrid.svg"),
    "hybrid-blocks.svg": ("inspect", "hybrid.json", "--svg", "hybrid-blocks.svg", "--blocks", "4-6"),
    "mla.svg": ("inspect", "mla.json", "--svg", "mla.svg"),
    "tp2-to-tp1.svg": (
        "plan", "--producer", "P0.json", "P1.json", "--consumer", "D0.json",
        "--request", "R.json", "--svg", "tp2-to-tp1.svg",
    ),
}  # fmt: skip


def hybrid() -> Layout:
    """A rank of a hybrid model: attention and state layers take turns, and their pages overlay one storage."""
    components: list[Component] = []
    for pair in range(6):
        base = 140_000_000_000 + pair * 40 * HYBRID_STRIDE
        attention = page(
            f"model.layers.{2 * pair + 1}.self_attn.attn", heads=(0, 2, 4), tokens=64, nbytes=576, num_blocks=40,
            kernel_blocks=12, address=base, group=0,
        )  # fmt: skip
        components.append(_typed(attention, "bfloat16:k128+v160"))
        offset = 0
        for name, channels, nbytes in SECTIONS:
            section = state(
                f"model.layers.{2 * pair}.linear_attn", part=(0, channels, 2 * channels), nbytes=nbytes, num_blocks=40,
                address=base + offset, group=1, component=name, block_stride=HYBRID_STRIDE,
            )  # fmt: skip
            components.append(_typed(section, "float32" if name == "ssm" else "bfloat16"))
            offset += section.live_bytes
    groups = [Group("attention", 768), Group("state", 768)]
    regions = [Region(140_000_000_000 + pair * 40 * HYBRID_STRIDE, 40 * HYBRID_STRIDE) for pair in range(6)]
    return worker(components, groups=groups, regions=regions, engine_id="prefill-0")


def mla() -> Layout:
    """MLA with a sparse-attention indexer: one latent row a token, and index keys with their scales apart."""
    components: list[Component] = []
    regions: list[Region] = []
    for layer in range(61):
        name = f"model.layers.{layer}.self_attn"
        latent, keys = (150_000_000_000 + layer * 200_000_000 + part * 100_000_000 for part in range(2))
        rows = page(f"{name}.attn", tokens=64, nbytes=1_152, num_blocks=512, address=latent)
        components.append(_typed(rows, "bfloat16:latent512+rope64"))
        for part, nbytes, offset in (("data", 128, 0), ("scale", 4, 64 * 128)):
            rows = page(
                f"{name}.indexer", component=part, tokens=64, nbytes=nbytes, num_blocks=512, address=keys + offset,
                block_stride=9_216,
            )  # fmt: skip
            components.append(_typed(rows, "fp8_e4m3" if part == "data" else "float32"))
        regions += [Region(latent, 512 * 73_728), Region(keys, 512 * 9_216)]
    return worker(components, regions=regions, engine_id="decode-0")


def _typed(component: Component, words: str) -> Component:
    return msgspec.structs.replace(component, content=Content(component.content.nbytes, words))


def token_major(first: int, heads: int, base: int, engine: str) -> Layout:
    """``heads`` of eight heads, one token after the other, four layers."""
    layers = [
        page(
            f"model.layers.{n}.attn", heads=(first, heads, 8), tokens=16, nbytes=256, num_blocks=64,
            order="token-major", address=base + n * 64 * heads * 16 * 256,
        )
        for n in range(4)
    ]  # fmt: skip
    return worker([_typed(one, "bfloat16:k64+v64") for one in layers], engine_id=engine)


def examples() -> dict[str, bytes]:
    """Every input file of the page, by name."""
    tables = (BlockTable.of([7, 3, 12, 9, 20], first_token=0),), (BlockTable.of([40, 22, 5, 31, 8], first_token=0),)
    sides = {"P0.json": (0, 4, "prefill"), "P1.json": (4, 4, "prefill"), "D0.json": (0, 8, "decode")}
    files = {
        name: encode_layout(token_major(first, heads, 160_000_000_000 + 2**30 * place, engine))
        for place, (name, (first, heads, engine)) in enumerate(sides.items())
    }
    return files | {
        "hybrid.json": encode_layout(hybrid()),
        "mla.json": encode_layout(mla()),
        "R.json": encode_request(TransferRequest(0, 72, *tables)),
    }


def make(folder: Path, layouts: Path) -> None:
    """Write the inputs to ``layouts`` and the pictures to ``folder``."""
    layouts.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in examples().items():
        (layouts / name).write_bytes(data)
    for words in COMMANDS.values():
        answer = call([_located(word, folder, layouts) for word in words])
        if answer.status:
            raise SystemExit(f"kvferry {' '.join(words)}: {answer.err}")


def _located(word: str, folder: Path, layouts: Path) -> str | Path:
    where = {".svg": folder, ".json": layouts}.get(Path(word).suffix)
    return where / word if where else word


def main(argv: Sequence[str] | None = None) -> None:
    """Read the options and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=Path, help="leave the input files here")
    parser.add_argument("--pictures", type=Path, default=FOLDER, help="where the pictures go (docs/pictures)")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as scratch:
        make(options.pictures, options.layouts or Path(scratch))
        if options.layouts:
            names = sorted(path.name for path in options.layouts.glob("*.json"))
            print(f"wrote {', '.join(names)} into {options.layouts}")


if __name__ == "__main__":
    main()
