"""Where is what: the layout model.

Glossary:

* **component**: one tensor, or part of one, that is addressed or sharded in its own way: a labelled strided box;
* **axis**: ``token`` counts rows in a kernel block and is local; of every other axis a rank holds a part of a whole;
* **block**: what a block table entry names; **kernel block**: one of the equal pieces a block is split into by the
  attention kernel; **page**: the bytes of one kernel block; **row**: what stands at one coordinate of the token axis;
* **group**: layers that share one block table; groups may overlay one storage;
* **region**: memory registered for transfer; **storage**: regions whose relative position matters;
* **placement**: a layout without addresses; **binding**: the addresses of one worker.
"""

from kvferry.layout.check import ENUMERATION_LIMIT, check_layout
from kvferry.layout.file import FORMAT, encode_layout, parse_layout
from kvferry.layout.nest import Loop, Nest, nest_of, spread
from kvferry.layout.placement import (
    Binding,
    BoundLayout,
    Placed,
    Placement,
    Span,
    Storage,
    bind_layout,
    check_binding,
    decode_placement,
    encode_placement,
    regions_of,
)
from kvferry.layout.records import (
    TOKEN,
    Axis,
    Component,
    Content,
    ContextParallel,
    Group,
    InvalidLayoutError,
    Layout,
    Parallel,
    Region,
)

__all__ = [
    "ENUMERATION_LIMIT",
    "FORMAT",
    "TOKEN",
    "Axis",
    "Binding",
    "BoundLayout",
    "Component",
    "Content",
    "ContextParallel",
    "Group",
    "InvalidLayoutError",
    "Layout",
    "Loop",
    "Nest",
    "Parallel",
    "Placed",
    "Placement",
    "Region",
    "Span",
    "Storage",
    "bind_layout",
    "check_binding",
    "check_layout",
    "decode_placement",
    "encode_layout",
    "encode_placement",
    "nest_of",
    "parse_layout",
    "regions_of",
    "spread",
]
