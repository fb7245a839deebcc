"""The connector against the contract of every supported vLLM release, and each release against the one before.

A new release is added by ``make contract RELEASE=...``. If it asks for something else than the last one,
:func:`test_what_is_new_in_a_release_has_been_looked_at` fails by the names of what is new, until they stand in
``REVIEWED`` with what was done.
"""

import zipfile
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from kvferry.protocol import Pull, Reply, Status
from kvferry.testing.vllm_contract import (
    OURS,
    Contract,
    Method,
    Parameter,
    defines,
    differences,
    imported_names,
    installed_sources,
    our_class,
    our_connector,
    our_uses,
    read_contract,
    read_file,
    wheel_sources,
    write_contract,
)
from kvferry.testing.vllm_uses import Use, uses_of
from kvferry.vllm.releases import TRIED, release_of

FOLDER = Path(__file__).parent / "contract"


def contracts() -> list[Contract]:
    found = [read_file(path) for path in FOLDER.glob("vllm-*.json")]
    return sorted(found, key=lambda one: tuple(int(part) for part in one.release.split(".")))


EVERY = contracts()
RELEASES = pytest.mark.parametrize("contract", EVERY, ids=[one.release for one in EVERY])

REVIEWED = {
    "0.33.0": {
        "KVConnectorBase_V1.supports_sleep_mode": "answered no; 0.32 does not ask and is refused at start-up",
        "KVConnectorBase_V1.unregister_kv_caches": "called for sleep mode only: refused once more, before memory goes",
        "KVConnectorBase_V1.restore_kv_caches": "called after the above only",
        "Executor.get_class": "picks among vLLM's own; ours is given as a class",
        "Executor.get_simple_cpu_offload_num_blocks": "of another connector",
        "Executor.profile": "never called for a dump",
        "Executor.set_kv_cache_layout": "passes the layout on to the workers through collective_rpc, which is ours",
        "ModelConfig.supports_mamba_prefix_caching": "not used",
        "RocmAiterUnifiedAttentionImpl._shuffle_kv_views": "keys and values shuffled on one GPU: releases.order_of",
        "RocmAiterUnifiedAttentionImpl._split_kv_cache": "the same",
        "RocmAiterUnifiedAttentionImpl.do_kv_cache_update": "the same",
        "RocmAiterUnifiedAttentionImpl.do_rope_and_kv_cache_update": "the same",
        "RocmAiterUnifiedAttentionImpl.set_interleaved_v_cache": "does nothing here",
        "RocmAttentionImpl.set_interleaved_v_cache": "values interleaved by a fused kernel: releases.order_of",
        "RocmAttentionImpl.do_kv_cache_update": "the same",
        "RocmAttentionImpl.do_rope_and_kv_cache_update": "the same",
        "TritonAttentionImpl.do_kv_cache_update": "tells the compiler how large the cache is; writes as before",
        "MooncakeXferMetadata": "layout_id: a pull may come without its regions; then it is answered LAYOUT_MISS",
        "MooncakeXferResponse": "layout_id: never said by us, so such a consumer sends its regions each time",
        "MooncakeXferResponseStatus": "LAYOUT_MISS: said to nobody but a sender of a layout_id",
        "MooncakeConnectorWorker.__init__": "state of the above",
        "MooncakeConnectorWorker._build_pull_metadata": "the pull, with regions or without",
        "MooncakeConnectorWorker._lookup_peer_layout": "regions that were sent before",
        "MooncakeConnectorWorker._peer_layout_key": "by address, ranks, sizes and layout_id",
        "MooncakeConnectorWorker._remember_peer_layout": "kept after a pull that brought them",
        "MooncakeConnectorWorker._prepare_transfer_regions": "keeps them; checks as before",
        "MooncakeConnectorWorker.send_kv_to_decode": "answers LAYOUT_MISS; never to us, who send the regions each time",
        "MooncakeConnectorWorker.receive_kv_from_single_worker": "sends the regions again after LAYOUT_MISS; a FINISH "
        "that leaves a request out is a failure of it, where 0.32 waited",
        "MooncakeConnectorWorker.process_pulling_result": "an id that was not asked for is skipped, where 0.32 failed",
        "MooncakeConnectorWorker._handle_failed_recv": "a failure waits for the other ranks before blocks are freed",
        "MooncakeConnectorWorker._complete_pull_task": "counts those ranks",
        "MooncakeConnectorWorker.register_kv_caches": "a new layout_id with each registration",
        "MooncakeConnectorWorker.unregister_kv_caches": "sleep mode",
        "MooncakeConnectorWorker.restore_kv_caches": "sleep mode",
    },
}
"""What each release has differently from the one before, and what was done about it."""

USED = {
    "KVConnectorOutput": {"finished_recving", "failed_recving", "kv_connector_worker_meta"},
    "RequestStatus": {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"},
    "KVCacheSpec": {"block_size", "tokens_per_state", "prefix_replay_tokens"},
    "AttentionSpec": {
        "num_heads", "num_kv_heads", "num_head_slots", "head_size", "dtype", "kv_quant_mode", "max_tp_shards",
        "dcp_sharded", "state_content_size_bytes", "unpadded_page_size_bytes", "page_size_bytes",
    },
    "FullAttentionSpec": {"head_size_v"},
    "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens", "head_size_v"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MLAAttentionSpec": {"num_kv_heads"},
    "SlidingWindowMLASpec": {"num_kv_heads"},
    "MambaSpec": {"shapes", "dtypes", "mamba_type", "tp_replicated", "state_content_size_bytes", "page_size_bytes"},
    "CircularBufferSpec": {"unpadded_page_size_bytes"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "CacheHitSource": {"P2P"},
}  # fmt: skip
"""Members that ``kvferry.vllm`` uses where no annotation says so, and so no reader finds them."""

NARROWED = {"KVCacheSpec": {"SlidingWindowSpec", "ChunkedLocalAttentionSpec", "UniformTypeKVCacheSpecs"}}
"""Classes whose instances are asked for being one of a derived class first."""

OUR_CLASSES = {
    "statistics.py": {"FerryStats": "KVConnectorStats", "FerryPromMetrics": "KVConnectorPromMetrics"},
    "dump.py": {"RanksInTurn": "Executor", "ShapesOnlyLoader": "BaseModelLoader"},
    "metadata.py": {"FerryWorkerMetadata": "KVConnectorWorkerMetadata"},
}
"""What derives from vLLM's classes beside the connector."""


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


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in OUR_CLASSES.items() for name in names])
@RELEASES
def test_our_other_classes_fit_what_they_derive_from(contract: Contract, file: str, name: str) -> None:
    base, ours = contract.connector[OUR_CLASSES[file][name]], our_class(file, name)
    shared = {method for method in ours.keys() & base.keys() if method != "__init__"}
    assert shared
    assert [method for method in shared if not parameters_fit(ours[method], base[method])] == []
    assert {method for method, one in base.items() if one.must_be_written} - ours.keys() == set()


@RELEASES
def test_what_is_imported_and_used_is_there(contract: Contract) -> None:
    there = set(contract.imports)
    wanted = {f"{module}:{name}" for module, name in imported_names(OURS)}
    assert wanted - there == set(), f"not in vLLM {contract.release}, or run: make contract RELEASE={contract.release}"
    gone = {owner: names - set(contract.members.get(owner, ())) for owner, names in USED.items()}
    assert {owner: names for owner, names in gone.items() if names} == {}


@RELEASES
def test_every_use_that_the_annotations_tell_is_there(contract: Contract) -> None:
    uses = our_uses(contract)
    known = {(use.owner, use.name) for use in uses}
    assert known > {
        ("Request", "num_computed_tokens"),
        ("VllmConfig", "parallel_config"),
        ("ParallelConfig", "world_size"),
        ("KVCacheConfig", "transfer_group_ids"),
        ("KVCacheGroupSpec", "layer_names"),
        ("BlockPool", "touch"),
        ("KVConnectorOutput", "failed_recving"),
    }
    missing = {
        f"{use.owner}.{use.name} in {use.place}"
        for use in uses
        if all(use.name not in contract.members[name] for name in {use.owner} | NARROWED.get(use.owner, set()))
    }
    assert missing == set()


@RELEASES
def test_every_call_that_the_annotations_tell_can_be_made(contract: Contract) -> None:
    calls = [use for use in our_uses(contract) if use.arguments is not None]
    unfit = [use for use in calls if f"{use.owner}.{use.name}" in contract.called and not can_be_called(contract, use)]
    assert unfit == []
    assert {"BlockPool.touch", "BlockPool.free_blocks", "KVCacheBlocks.get_block_ids"} <= contract.called.keys()


def can_be_called(contract: Contract, use: Use) -> bool:
    _, *parameters = contract.called[f"{use.owner}.{use.name}"].parameters
    assert use.arguments is not None
    count, names = use.arguments
    plain = [one for one in parameters if not one.kind]
    given = {one.name for one in plain[:count]} | set(names)
    asked = {one.name for one in parameters if not one.has_default and one.kind in ("", "keyword")}
    return count <= len(plain) and asked <= given <= {one.name for one in parameters}


class TestPeer:
    """vLLM's own connector: its records, beside ours."""

    @RELEASES
    def test_we_write_its_fields_in_its_order(self, contract: Contract) -> None:
        theirs = [name for name in contract.records["MooncakeXferMetadata"] if name != "layout_id"]
        assert theirs == [name for name in Pull.__struct_fields__ if name != "kvferry"]
        answers = [name for name in contract.records["MooncakeXferResponse"] if name != "layout_id"]
        assert answers == [name for name in Reply.__struct_fields__ if name != "kvferry"]

    @RELEASES
    def test_what_we_leave_out_has_a_default_there(self, contract: Contract) -> None:
        fields = contract.records["MooncakeXferMetadata"]
        assert fields.get("layout_id", "0") == "0", "nought: the regions come with each pull"
        assert contract.records["MooncakeXferResponse"].get("layout_id", "0") == "0"
        asked = {name for name, default in fields.items() if not default}
        assert asked == {one.encode_name for one in msgspec.structs.fields(Pull) if one.required}

    @RELEASES
    def test_its_statuses_are_ours(self, contract: Contract) -> None:
        theirs = {name: int(value) for name, value in contract.records["MooncakeXferResponseStatus"].items()}
        assert theirs.items() <= {status.name: status.value for status in Status}.items()

    @RELEASES
    def test_it_registers_as_before(self, contract: Contract) -> None:
        assert list(contract.records["RegisterWorkerPayload"]) == ["engine_id", "dp_rank", "tp_rank", "pp_rank", "addr"]
        assert list(contract.records["EngineEntry"]) == ["engine_id", "worker_addr"]


def test_every_release_that_is_said_to_be_tried_has_its_file() -> None:
    assert [release_of(contract.release) for contract in EVERY] == list(TRIED)


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


class TestUses:
    """The reader of uses, on a file made up here."""

    TEXT = """
class Half:
    def __init__(self, config: "VllmConfig | None", pool: "Pool"):
        self._config = config
        self._pool: Pool | None = pool

    def _bound(self) -> "Pool":
        return self._pool

    def step(self, request: "Request", *, anything: Any) -> None:
        first, second = self._config.parallel.size, request.blocks
        for block in second:
            block.free(1, why="over")
        self._bound().touch(*second)
        return [one.number for one in request.blocks], anything.of_no_class


def alone(request: "Optional[Request]"):
    return request.blocks[0].number
"""
    FIELDS: ClassVar = {
        "VllmConfig": {"parallel": "ParallelConfig"},
        "ParallelConfig": {},
        "Request": {"blocks": "list[Block]"},
        "Block": {},
        "Pool": {},
    }

    def test_names_attributes_loops_and_calls_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "half.py").write_text(self.TEXT)
        uses = list(uses_of(tmp_path, self.FIELDS))
        assert sorted({(use.owner, use.name) for use in uses}) == [
            ("Block", "free"),
            ("Block", "number"),
            ("ParallelConfig", "size"),
            ("Pool", "touch"),
            ("Request", "blocks"),
            ("VllmConfig", "parallel"),
        ]
        told = {(use.owner, use.name): use.arguments for use in uses}
        assert told["Block", "free"] == (1, ("why",))
        assert told["Pool", "touch"] is None
        assert told["Block", "number"] is None
        assert next(use.place for use in uses if use.name == "free").startswith("half.py:")


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

    def test_records_of_vllms_own_connector_are_read_in_their_order(self) -> None:
        def contract(text: str) -> Contract:
            path = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
            return read_contract("1.0.0", {path: text}.get)

        old = contract("class MooncakeXferMetadata:\n    port: int\n    size: int = 1\n")
        new = contract("class MooncakeXferMetadata:\n    size: int = 1\n    port: int\n")
        assert old.records == {"MooncakeXferMetadata": {"port": "", "size": "1"}}
        assert [(d.place, d.what) for d in differences(old, new)] == [("MooncakeXferMetadata", "another record")]

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
        assert read_file(write_contract(contract, tmp_path / "out")).records == {}
        assert {name.split(":")[1] for name in contract.imports} == {"parallel_state", "KVConnectorBase_V1"}
        assert defines(sources, "vllm.distributed", "Thing")
        assert not defines(sources, "vllm.distributed", "Other")
