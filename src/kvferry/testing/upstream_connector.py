"""vLLM's own MooncakeConnector, for a ``vllm serve`` on a machine without an accelerator.

The connector asks torch for the number of its device when it is built, and torch raises where there is none; so here
that number is 0, and nothing else is changed. Named as ``kv_connector_module_path``, vLLM imports this module in every
process that makes a connector, before it does.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

torch.accelerator.current_device_index = lambda: 0

__all__ = ["MooncakeConnector"]
