"""Small whole layouts that show one trait each; numbers that fit into a head.

>>> hybrid().components[0].block_stride
512
"""

from kvferry.layout import Component, Group, Layout, Region
from kvferry.testing.layouts import page, state, worker


def hybrid(address: int = 4096) -> Layout:
    """Layers 1 and 3 attention, 0 and 2 state, each pair of them over one storage of 4 blocks of 512 bytes."""
    components: list[Component] = []
    for pair in range(2):
        base = address + pair * 4 * 512
        attention = page(
            f"m.{2 * pair + 1}.attn", heads=(0, 2, 4), tokens=4, nbytes=16, num_blocks=4, kernel_blocks=4, address=base
        )
        sections = [
            state(
                f"m.{2 * pair}.mix", part=(0, channels, 2 * channels), nbytes=16, num_blocks=4, group=1,
                component=name, address=base + offset, block_stride=512,
            )
            for name, channels, offset in (("conv", 4, 0), ("ssm", 16, 64))
        ]  # fmt: skip
        components += [attention, *sections]
    groups = [Group("attention", 16), Group("state", 16)]
    return worker(components, groups=groups, regions=[Region(address, 4096)], engine_id="e0")


def token_major(first: int, count: int, address: int, *, tokens: int = 4, layers: int = 2) -> Layout:
    """``count`` of four heads, one token after the other; 16 bytes a head and token, 8 blocks."""
    size = count * tokens * 16 * 8
    pages = [
        page(
            f"m.{n}.attn", heads=(first, count, 4), tokens=tokens, nbytes=16, order="token-major",
            address=address + n * size,
        )
        for n in range(layers)
    ]  # fmt: skip
    return worker(pages)
