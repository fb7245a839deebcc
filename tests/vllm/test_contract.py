"""The connector against the contract of every supported vLLM release, and each release against the one before.

A new release is added by ``make contract RELEASE=...``. If it asks for something else than the last one,
:func:`test_what_is_new_in_a_release_has_been_looked_at` fails by the names of what is new, until they stand in
``REVIEWED`` with what was done.
"""

import zipfile
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvferry.testing.vllm_contract import (
    OURS,
    Contract,
    Method,
    Parameter,
    defines,
    differences,
    imported_names,
    installed_sources,
    our_connector,
    read_contract,
    read_file,
    wheel_sources,
    write_contract,
)

FOLDER = Path(__file__).parent / "contract"


def contracts() -> list[Contract]:
    found = [read_file(path) for path in FOLDER.glob("vllm-*.json")]
    return sorted(found, key=lambda one: tuple(int(part) for part in one.release.split(".")))


EVERY = contracts()
RELEASES = pytest.mark.parametrize("contract", EVERY, ids=[one.release for one in EVERY])

REVIEWED = {
    "0.33.0": {
        "KVConnectorBase_V1.supports_sleep_mode": "answered no; 0.32 does not ask and is refused at start-up",
        "KVConnectorBase_V1.unregister_kv_caches": "called for sleep mode only, which is refused",
        "KVConnectorBase_V1.restore_kv_caches": "called for sleep mode only, which is refused",
    },
}
"""What each release has differently from the one before, and what was done about it."""

USED = {
    "Request": {
        "request_id", "prompt_token_ids", "_all_token_ids", "num_prompt_tokens", "num_computed_tokens", "max_tokens",
        "status", "kv_transfer_params", "lora_request", "prompt_embeds", "skip_reading_prefix_cache",
    },
    "RequestStatus": {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"},
    "KVConnectorOutput": {"finished_recving", "failed_recving", "kv_connector_worker_meta"},
    "BlockPool": {"blocks", "touch", "free_blocks"},
    "KVCacheBlocks": {"get_block_ids"},
    "KVCacheBlock": {"is_null"},
    "KVCacheConfig": {
        "num_blocks", "kv_cache_groups", "kv_cache_tensors", "kv_cache_layout", "transfer_groups", "transfer_group_ids",
        "needs_kv_cache_zeroing",
    },
    "KVCacheGroupSpec": {"layer_names", "kv_cache_spec", "enable_kv_transfer"},
    "KVCacheTensor": {"layers", "offset", "layer_stride", "block_stride", "host_resident"},
    "KVCacheSpec": {"block_size", "tokens_per_state"},
    "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MambaSpec": {"shapes", "dtypes"},
    "CacheHitSource": {"P2P"},
    "KVTransferConfig": {"engine_id", "kv_connector_extra_config", "is_kv_producer", "is_kv_consumer"},
    "ParallelConfig": {
        "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "world_size",
        "data_parallel_index", "data_parallel_rank_local", "data_parallel_master_ip", "local_engines_only",
        "nnodes_within_dp", "master_addr",
    },
}  # fmt: skip
"""Members that ``kvferry.vllm`` uses beyond what it imports."""


def parameters_fit(ours: Method, theirs: Method) -> bool:
    """Every call that vLLM's signature allows, ours allows: the same names in the same order."""
    names = [parameter.name for parameter in ours.parameters]
    return names == [parameter.name for parameter in theirs.parameters] and ours.kind == theirs.kind


@RELEASES
def test_every_method_has_the_signature_that_the_release_calls(contract: Contract) -> None:
    base = {**contract.connector["KVConnectorBase_V1"], **contract.connector["SupportsHMA"]}
    ours = our_connector()
    assert [name for name in ours.keys() & base.keys() if not parameters_fit(ours[name], base[name])] == []
    missing = {name for name, method in base.items() if method.must_be_written} - ours.keys()
    assert missing == set()


def test_every_hook_that_is_implemented_is_called_by_some_release() -> None:
    known = {name for one in EVERY for owner in one.connector.values() for name in owner}
    assert {name for name in our_connector() if not name.startswith("_")} - known == set()


@RELEASES
def test_what_is_imported_and_used_is_there(contract: Contract) -> None:
    there = set(contract.imports)
    wanted = {f"{module}:{name}" for module, name in imported_names(OURS)}
    assert wanted - there == set(), f"not in vLLM {contract.release}, or run: make contract RELEASE={contract.release}"
    gone = {owner: names - set(contract.members.get(owner, ())) for owner, names in USED.items()}
    assert {owner: names for owner, names in gone.items() if names} == {}


def test_what_is_new_in_a_release_has_been_looked_at() -> None:
    for old, new in pairwise(EVERY):
        found = {difference.place: difference.what for difference in differences(old, new)}
        unseen = {place: what for place, what in found.items() if place not in REVIEWED.get(new.release, {})}
        assert unseen == {}, f"vLLM {new.release} differs from {old.release}"


def test_the_installed_release_is_the_one_on_file() -> None:
    try:
        release = version("vllm").split("+")[0]
    except PackageNotFoundError:
        pytest.skip("vllm is not installed")
    live = read_contract(release, installed_sources())
    (kept,) = [one for one in EVERY if one.release == release]
    assert list(differences(kept, live)) == []
    assert live == kept


class TestReading:
    """The reader, on a release made up here."""

    TEXT = '''
class KVConnectorBase_V1:
    def __init__(self, config, role=None):
        self.role = role

    @property
    def name(self):
        """Its name."""

    @abstractmethod
    def start(self, context: "Context", **kwargs) -> None:
        """Start."""

    @classmethod
    def build(cls, *, data=None, other): ...
'''

    def contract(self, text: str) -> Contract:
        wanted = {
            "distributed/kv_transfer/kv_connector/v1/base.py": text,
            "v1/request.py": "class Request:\n    a: int\n",
        }
        return read_contract("1.0.0", wanted.get)

    def test_methods_are_read_with_what_matters(self) -> None:
        methods = self.contract(self.TEXT).connector["KVConnectorBase_V1"]
        assert methods["__init__"].parameters == (
            Parameter("self"),
            Parameter("config"),
            Parameter("role", has_default=True),
        )
        assert methods["name"].kind == "property"
        assert methods["start"].must_be_written
        assert methods["start"].parameters[-1] == Parameter("kwargs", "**")
        assert methods["build"].parameters[1:] == (Parameter("data", "keyword", True), Parameter("other", "keyword"))

    @pytest.mark.parametrize(
        ("before", "after", "told"),
        [
            ('"""Start."""', '"""Start soon."""', "changed: says"),
            ("**kwargs", "step, **kwargs", "changed: parameters"),
            ("    @abstractmethod\n", "", "changed: must_be_written"),
            ("def start", "def begin", "gone"),
            ('"""Start."""', '"""Start."""\n        return 1', "changed: does"),
        ],
    )
    def test_every_kind_of_change_is_told(self, before: str, after: str, told: str) -> None:
        old, new = self.contract(self.TEXT), self.contract(self.TEXT.replace(before, after))
        found = {difference.place: difference.what for difference in differences(old, new)}
        assert found["KVConnectorBase_V1.start"] == told
        assert list(differences(old, old)) == []

    def test_a_member_that_is_gone_is_told(self) -> None:
        old = self.contract(self.TEXT)
        new = msgspec.structs.replace(old, members={"Request": ()})
        assert [(d.place, d.what) for d in differences(old, new)] == [("Request.a", "gone")]

    def test_a_wheel_is_read_without_being_installed(self, tmp_path: Path) -> None:
        wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/distributed/kv_transfer/kv_connector/v1/base.py", self.TEXT)
            archive.writestr("vllm/distributed/__init__.py", 'LAZY = {"Thing": ".thing"}')
            archive.writestr("vllm/distributed/parallel_state.py", "")
        sources = wheel_sources(wheel)
        contract = read_contract("9.9.9", sources)
        assert read_file(write_contract(contract, tmp_path / "out")) == contract
        assert contract.connector.keys() == {"KVConnectorBase_V1"}
        assert {name.split(":")[1] for name in contract.imports} == {"parallel_state", "KVConnectorBase_V1"}
        assert defines(sources, "vllm.distributed", "Thing")
        assert not defines(sources, "vllm.distributed", "Other")
