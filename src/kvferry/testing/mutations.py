"""Making bad messages out of good ones, by chance: structure first, then bytes.

A message is taken apart (MessagePack or JSON), some of its nodes are replaced by values that decoders get wrong, keys
are dropped, doubled and renamed, lists are repeated, maps are nested; then it is put together again. Some messages are
hit in their bytes as well, or in these alone, where lengths lie and texts break. All follows from the ``Random`` given.
"""

import random
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

Form = Literal["msgpack", "json", "text"]
"""How messages are made; one of the last kind is hit in its bytes alone."""

Node = Any
"""What a message is made of: map, list, text, bytes, number, truth or nothing."""

NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 7, 16, 255, 256, 65_535, 65_536, -65_536, 2**20, 2**31 - 1, 2**31, -(2**31), 2**32),
    *(2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1),
)
FLOATS: Final = (0.0, -0.0, 1.5, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS: Final = (
    *("", "0", "-1", "a" * 513, "\u0000", "\u202e", "\U0001f600", "kvferry", "pull", "hello", "reply", "layouts"),
    *("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://x:99999", "tcp://", "cma:1:1:1:x", "127.0.0.1:1", "../../x", "%n%s"),
)

LYING_HEADS: Final = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(
        b"\xdc\xff\xff",
        b"\xde\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xd9\xff",
        b"\xc1",
        b"\x91" * 400,
        b"\x81" * 400,
    ),
    *(b"[" * 400, b'{"a":' * 400, b"1" * 5000, b'"\\ud800"', b"1e999", b"-", b"\xff\xfe"),
)
"""Lengths that the buffer cannot hold, types that do not exist, nests without a bottom."""


def random_value(chance: random.Random, depth: int = 0) -> Node:
    """Something that a field may not expect."""
    kind = chance.randrange(10 if depth < 3 else 7)
    match kind:
        case 0 | 1:
            return chance.choice(NUMBERS)
        case 2:
            return chance.choice(FLOATS)
        case 3 | 4:
            return chance.choice(TEXTS)
        case 5:
            return None
        case 6:
            return chance.random() < 0.5
        case 7:
            return chance.randbytes(chance.choice((0, 1, 8, 64)))
        case 8:
            return [random_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 3, 300)))]
        case _:
            return {chance.choice(TEXTS): random_value(chance, depth + 1) for _ in range(chance.randrange(4))}


def deep(chance: random.Random) -> Node:
    """A nest that a careless reader falls through."""
    node: Node = 0
    for _ in range(chance.choice((10, 100, 900))):
        node = [node] if chance.random() < 0.5 else {"kvferry": node}
    return node


def mutate_node(node: Node, chance: random.Random) -> Node:
    """A copy of ``node`` with one place changed, which is as likely to be far down as near the top."""
    if isinstance(node, dict) and node and chance.random() < 0.9:
        return _mutate_map(node, chance)
    if isinstance(node, list) and node and chance.random() < 0.9:
        return _mutate_list(node, chance)
    return _replacement(node, chance)


def gentle_node(node: Node, chance: random.Random) -> Node:
    """A copy with one value changed for another of its kind, so that it gets past the types and on to the sense."""
    if isinstance(node, dict) and node:
        key = chance.choice(list(node))
        return {**node, key: gentle_node(node[key], chance)}
    if isinstance(node, list) and node:
        made, place = list(node), chance.randrange(len(node))
        match chance.randrange(5):
            case 0:
                del made[place]
            case 1:
                made.insert(place, made[chance.randrange(len(made))])
            case _:
                made[place] = gentle_node(made[place], chance)
        return made
    return _of_its_kind(node, chance)


def _of_its_kind(node: Node, chance: random.Random) -> Node:
    if type(node) is bool or node is None:
        return chance.choice((True, False, None))
    if type(node) is int:
        near = (0, 1, node + 1, max(0, node - 1), node * 2, node // 2, node + chance.choice((8, 16, 4096)))
        return chance.choice((*near, *near, *(number for number in NUMBERS if 0 <= number < 2**63)))
    if isinstance(node, str):
        return chance.choice((node[:-1], node + "x", node[::-1], *TEXTS))
    return mutate_inside(node, chance) if isinstance(node, bytes) else node


def _mutate_map(node: dict[Any, Node], chance: random.Random) -> dict[Any, Node]:
    made = dict(node)
    key = chance.choice(list(made))
    match chance.randrange(8):
        case 0:
            del made[key]
        case 1:
            made[chance.choice(TEXTS)] = random_value(chance)
        case 2:
            made[random.Random(chance.random()).choice((*TEXTS, key))] = made.pop(key)
        case _:
            made[key] = mutate_node(made[key], chance)
    return made


def _mutate_list(node: list[Node], chance: random.Random) -> list[Node]:
    made = list(node)
    place = chance.randrange(len(made))
    match chance.randrange(8):
        case 0:
            del made[place]
        case 1:
            made.insert(place, random_value(chance))
        case 2:
            made = (made * chance.choice((2, 50, 700)))[:4000]
        case _:
            made[place] = mutate_node(made[place], chance)
    return made


def _replacement(node: Node, chance: random.Random) -> Node:
    if type(node) is int and chance.random() < 0.7:
        return chance.choice((node + 1, node - 1, -node, node * 2, node ^ (1 << chance.randrange(63)), *NUMBERS[-8:]))
    if isinstance(node, str) and chance.random() < 0.4:
        return node + chance.choice(TEXTS)
    if isinstance(node, bytes) and chance.random() < 0.8:
        return mutate_inside(node, chance)
    return deep(chance) if chance.random() < 0.03 else random_value(chance)


def mutate_inside(data: bytes, chance: random.Random) -> bytes:
    """Bytes that are a message of their own, such as a placement in a pull."""
    try:
        node = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return mutate_bytes(data, chance)
    change = gentle_node if chance.random() < 0.7 else mutate_node
    return encode(change(node, chance), msgspec.msgpack.encode) or data


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with a few bytes changed, taken out, put in or repeated."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(made) + 1)
        match chance.randrange(6):
            case 0 if place < len(made):
                made[place] ^= 1 << chance.randrange(8)
            case 1:
                del made[place : place + chance.choice((1, 2, 16))]
            case 2:
                made[place:place] = chance.randbytes(chance.choice((1, 2, 16)))
            case 3:
                made[place:place] = chance.choice(LYING_HEADS)
            case 4:
                del made[place:]
            case _:
                made[place:place] = made[place : place + 64] * chance.choice((1, 2, 20))
    return bytes(made)


def encode(node: Node, encoder: Callable[[Node], bytes]) -> bytes | None:
    """The bytes of a node; ``None`` for one that this form cannot hold."""
    try:
        return encoder(node)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError):
        return None


def bad_message(good: bytes, chance: random.Random, *, form: Form) -> bytes:
    """A message made of a good one; now and then nothing of it is left, and now and then it is still good."""
    luck = chance.random()
    if luck < 0.05:
        return chance.randbytes(chance.choice((0, 1, 5, 40, 400)))
    if luck < 0.2 or form == "text":
        return mutate_bytes(good, chance)
    codec = msgspec.json if form == "json" else msgspec.msgpack
    node = codec.decode(good)
    change = gentle_node if luck < 0.7 else mutate_node
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        node = change(node, chance)
    data = encode(node, codec.encode)
    if data is None:
        return mutate_bytes(good, chance)
    return mutate_bytes(data, chance) if luck > 0.9 else data
