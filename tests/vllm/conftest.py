"""vLLM warns while it is imported (of torch's deprecations, not of ours), so it is imported here, quietly."""

import importlib
import importlib.util
import os
import warnings

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("vllm.v1.core.sched.scheduler", "vllm.engine.arg_utils", "kvferry.vllm.connector"):
            importlib.import_module(module)
