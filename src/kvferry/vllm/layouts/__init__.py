"""What vLLM registers, as a layout.

Between pages the tensor is believed; inside a page only the table of known attention backends. Glossary:

* **view**: a tensor without torch, ``[rows, slots, states, content]``; only its first axis and its strides are facts;
* **slot**: the view's second axis, most often heads, in some backends {K, V};
* **page**: one kernel block of one layer of one rank; **part**: a component as it lies in every page;
* **heads**: those of the whole model that a rank holds; **shard**: a rank's piece of what cannot be looked into.

``geometry``, ``heads``, ``backends`` and ``state`` are plain integers and exported here. ``groups``, ``facts`` and
``extract`` (whose ``layout_of_worker`` is the entry) need vLLM and are imported by name.
"""

from kvferry.vllm.layouts.backends import TABLE, Entry, Page, Part, parts_of
from kvferry.vllm.layouts.geometry import PageSpec, Paging, View, check_page, paging_of, split_further
from kvferry.vllm.layouts.heads import Heads, TensorRank, heads_of, replicated
from kvferry.vllm.layouts.state import StateSpec, StateTensor, state_parts

__all__ = [
    "TABLE",
    "Entry",
    "Heads",
    "Page",
    "PageSpec",
    "Paging",
    "Part",
    "StateSpec",
    "StateTensor",
    "TensorRank",
    "View",
    "check_page",
    "heads_of",
    "paging_of",
    "parts_of",
    "replicated",
    "split_further",
    "state_parts",
]
