"""How bytes move: two layouts and the block tables of a request, compiled into proven copy descriptors.

Glossary (this room says ``src`` and ``dst``):

* **move**: one cell of one component, from one producer rank to one consumer rank;
* **class**: components whose tables, block strides and unit offsets are equal on both sides; bound together;
* **unit**: a stretch of positions that is uniform on both sides; **row** (of a class): one run of one unit;
* **compile**: placements -> plan, once; **bind**: plan + addresses + tables -> descriptors, for each request.
"""

from kvferry.plan.compile import MAX_DESCRIPTORS, PairPlan, Plan, compile_plan
from kvferry.plan.descriptors import Descriptors
from kvferry.plan.request import POSITION_LIMIT, BlockTable, InvalidRequestError, TransferRequest
from kvferry.plan.request_file import REQUEST_FORMAT, encode_request, parse_request
from kvferry.plan.verify import verify_descriptors

__all__ = [
    "MAX_DESCRIPTORS",
    "POSITION_LIMIT",
    "REQUEST_FORMAT",
    "BlockTable",
    "Descriptors",
    "InvalidRequestError",
    "PairPlan",
    "Plan",
    "TransferRequest",
    "compile_plan",
    "encode_request",
    "parse_request",
    "verify_descriptors",
]
