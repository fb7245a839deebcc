"""What kvferry needs of a vLLM release, read from the release's source, and kept as a small file.

A release's *contract* is: the methods of the classes that we derive from (parameters, whether they must be written,
and a digest of what their text and default say); the parts of vLLM that ``kvferry.vllm`` imports; the members of the
classes that it looks at, with their types and, where it calls them, their parameters; and the records and methods of
vLLM's own MooncakeConnector, which is a peer. It is read by parsing source, so a wheel can be looked at that was never
installed and fits no machine of ours.

``make contract RELEASE=0.33.0`` fetches that release's wheel, without its dependencies, and writes its file to
``tests/vllm/contract``. Tests compare the installed vLLM with the file of its version, our connector with every file,
and each file with the one before it: what is new there must have been looked at by somebody.
"""

import ast
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import kvferry
from kvferry.testing.vllm_uses import Fields, Use, uses_of

BASE: Final = "distributed/kv_transfer/kv_connector/v1/base.py"

CONNECTOR_CLASSES: Final = (
    "KVConnectorBase_V1",
    "SupportsHMA",
    "KVConnectorMetadata",
    "KVConnectorHandshakeMetadata",
    "KVConnectorWorkerMetadata",
    "KVConnectorTransferResults",
)
"""What a connector is made of, all in one file."""

DERIVED: Final = {
    BASE: CONNECTOR_CLASSES,
    "distributed/kv_transfer/kv_connector/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "v1/executor/abstract.py": ("Executor",),
    "model_executor/model_loader/base_loader.py": ("BaseModelLoader",),
}
"""Classes that ours derive from."""

MOONCAKE: Final = "distributed/kv_transfer/kv_connector/v1/mooncake"
PEER_RECORDS: Final = {
    f"{MOONCAKE}/mooncake_connector.py": (
        "MooncakeXferMetadata",
        "MooncakeXferResponse",
        "MooncakeXferResponseStatus",
    ),
    f"{MOONCAKE}/mooncake_utils.py": ("RegisterWorkerPayload", "EngineEntry"),
}
"""What vLLM's own connector puts on the wire."""

PEER_METHODS: Final = {
    f"{MOONCAKE}/mooncake_connector.py": ("MooncakeConnectorScheduler", "MooncakeConnectorWorker"),
    f"{MOONCAKE}/mooncake_utils.py": ("MooncakeBootstrapServer",),
}
"""What it does with them: one that changed must be read."""

BACKENDS: Final = tuple(
    f"v1/attention/backends/{name}.py"
    for name in (
        *("b12x", "cpu_attn", "flash_attn", "flash_attn_diffkv", "flashinfer", "flex_attention", "rocm_attn"),
        *("rocm_aiter_unified_attn", "triton_attn", "triton_attn_diffkv", "mla/cpu_mla", "mla/cutlass_mla"),
        *("mla/flashattn_mla", "mla/flashinfer_mla", "mla/flashinfer_mla_sparse", "mla/flashmla", "mla/indexer"),
        *("mla/flashmla_sparse", "mla/rocm_aiter_mla", "mla/sparse_swa", "mla/tokenspeed_mla", "mla/triton_mla"),
    )
)
"""Where the attention backends are whose order inside a page ``layouts/backends.py`` knows."""

_ORDERS: Final = re.compile(
    r"customize_spec|kv_cache_layouts|kernel_block_sizes|kv_cache_update$|split_kv_cache|shuffle|interleave|get_name"
)
"""Methods of theirs that decide it, or write a page."""

LOOKED_AT: Final = {
    "v1/request.py": ("Request", "RequestStatus"),
    "v1/outputs.py": ("KVConnectorOutput",),
    "v1/core/block_pool.py": ("BlockPool",),
    "v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "v1/core/kv_cache_utils.py": ("KVCacheBlock",),
    "v1/kv_cache_interface.py": (
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheTensor",
        "KVCacheSpec",
        "UniformTypeKVCacheSpecs",
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "CircularBufferSpec",
    ),
    "v1/metrics/cache_hit_source.py": ("CacheHitSource",),
    "config/kv_transfer.py": ("KVTransferConfig",),
    "config/parallel.py": ("ParallelConfig",),
    "config/vllm.py": ("VllmConfig",),
    "config/model.py": ("ModelConfig",),
    "config/cache.py": ("CacheConfig",),
    "config/compilation.py": ("CompilationConfig",),
    "config/speculative.py": ("SpeculativeConfig",),
    "v1/core/sched/output.py": ("SchedulerOutput",),
    "distributed/kv_transfer/kv_connector/v1/metrics.py": ("KVConnectorPromMetrics", "KVConnectorStats"),
}
"""Classes whose members are used here, by file."""

OURS: Final = Path(kvferry.__file__).parent / "vllm"
"""The only room that imports vLLM."""

Sources = Callable[[str], str | None]
"""The text of a file of the package, by its path in it; ``None`` where there is none."""


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """One parameter of a method."""

    name: str
    kind: str = ""
    """Empty for a plain one, else ``keyword``, ``*`` or ``**``."""
    has_default: bool = False


class Method(msgspec.Struct, frozen=True, omit_defaults=True):
    """One method of a class that connectors derive from."""

    parameters: tuple[Parameter, ...]
    must_be_written: bool = False
    """Whether it is abstract."""
    kind: str = ""
    """``classmethod``, ``staticmethod``, ``property`` or nothing."""
    says: str = ""
    """Digest of its text: another text, another meaning."""
    does: str = ""
    """Digest of what it does when it is not overridden."""


class Contract(msgspec.Struct, frozen=True):
    """What one release offers and asks."""

    release: str
    connector: dict[str, dict[str, Method]]
    """Methods of the classes that we derive from, by class."""
    members: dict[str, tuple[str, ...]]
    """Names of the members of the classes that are looked at, inherited ones among them, by class."""
    types: dict[str, dict[str, str]]
    """Annotations of their fields and properties, of those that are such classes themselves, by class."""
    called: dict[str, Method]
    """Methods of theirs that ``kvferry.vllm`` calls, as ``class.name``, and functions, as ``module:name``."""
    records: dict[str, dict[str, str]]
    """Of vLLM's own connector: fields in their order, each with its default or nothing."""
    peer: dict[str, dict[str, Method]]
    """Methods of vLLM's own connector, by class."""
    orders: dict[str, str]
    """Digests of what the known attention backends do with a page, as ``class.method``."""
    imports: tuple[str, ...]
    """What ``kvferry.vllm`` imports of it and what is there, as ``module:name``."""


def read_contract(release: str, sources: Sources) -> Contract:
    """The contract of a release whose files ``sources`` gives."""
    looked_at = {
        name: node
        for path, names in LOOKED_AT.items()
        for name, node in _classes(sources, path).items()
        if name in names
    }
    types = {name: dict(_types(node, looked_at)) for name, node in looked_at.items()}
    return Contract(
        release,
        _methods_of(sources, DERIVED),
        {name: tuple(sorted(set(_every_member(node, looked_at)))) for name, node in looked_at.items()},
        types,
        dict(sorted(_called(sources, looked_at, types))),
        {
            name: dict(_record(node))
            for path, names in PEER_RECORDS.items()
            for name, node in _classes(sources, path).items()
            if name in names
        },
        _methods_of(sources, PEER_METHODS),
        dict(sorted(_orders(sources))),
        tuple(sorted({f"{module}:{name}" for module, name in imported_names(OURS) if defines(sources, module, name)})),
    )


def our_uses(contract: Contract) -> list[Use]:
    """What ``kvferry.vllm`` takes from the classes that a contract describes."""
    every: Fields = {name: contract.types.get(name, {}) for name in contract.members}
    return list(uses_of(OURS, every))


def installed_sources() -> Sources:
    """Of the vLLM that this interpreter would import."""
    import importlib.util

    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed")
    root = Path(next(iter(found.submodule_search_locations)))
    return lambda path: (root / path).read_text() if (root / path).exists() else None


def wheel_sources(wheel: Path) -> Sources:
    """Of a wheel file."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    return lambda path: archive.read(f"vllm/{path}").decode() if f"vllm/{path}" in names else None


def imported_names(folder: Path) -> Iterator[tuple[str, str]]:
    """Each (module, name) that the files of ``folder`` import from vLLM."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def defines(sources: Sources, module: str, name: str) -> bool:
    """Whether a module of the release has this name: defined there, imported there, or a module of its own."""
    stem = "/".join(module.split(".")[1:])
    candidates = [f"{stem}.py", f"{stem}/__init__.py"] if stem else ["__init__.py"]
    inside = [f"{stem}/{name}.py", f"{stem}/{name}/__init__.py"] if stem else [f"{name}.py", f"{name}/__init__.py"]
    if any(sources(path) is not None for path in inside):
        return True
    return any(name in _names(text) for path in candidates if (text := sources(path)) is not None)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two releases have differently."""

    place: str
    what: str


def differences(old: Contract, new: Contract) -> Iterator[Difference]:
    """What a connector's author must look at when ``new`` follows ``old``; members that are only more are nothing."""
    for was, now in ((old.connector, new.connector), (old.peer, new.peer), ({"": old.called}, {"": new.called})):
        for owner in sorted(was.keys() | now.keys()):
            before, after = was.get(owner, {}), now.get(owner, {})
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    yield Difference(f"{owner}.{name}".strip("."), _change(before.get(name), after.get(name)))
    for place in sorted(old.orders.keys() | new.orders.keys()):
        if old.orders.get(place) != new.orders.get(place):
            yield Difference(place, "another order of a page, perhaps")
    for owner in sorted(old.members):
        for name in sorted(set(old.members[owner]) - set(new.members.get(owner, ()))):
            yield Difference(f"{owner}.{name}", "gone")
    for owner in sorted(old.records.keys() | new.records.keys()):
        if list(old.records.get(owner, {}).items()) != list(new.records.get(owner, {}).items()):
            yield Difference(owner, "another record")


def _change(before: Method | None, after: Method | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    changed = [field for field in Method.__struct_fields__ if getattr(before, field) != getattr(after, field)]
    return "changed: " + ", ".join(changed)


# ------------------------------------------------------------------------------------------------ reading source


def _classes(sources: Sources, path: str) -> dict[str, ast.ClassDef]:
    text = sources(path)
    tree = ast.parse(text) if text is not None else ast.Module([], [])
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _methods_of(sources: Sources, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Method]]:
    return {
        name: _methods(found[name])
        for path, names in wanted.items()
        for found in (_classes(sources, path),)
        for name in names
        if name in found
    }


def _every_member(owner: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    for node in _lineage(owner, known):
        yield from _members(node)


def _lineage(owner: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """The class, and those of its bases that are looked at too."""
    yield owner
    for base in owner.bases:
        if (name := ast.unparse(base).split(".")[-1]) in known:
            yield from _lineage(known[name], known)


def _types(owner: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    for node in [*_lineage(owner, known)][::-1]:
        for inner in node.body:
            match inner:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=said):
                    pass
                case ast.FunctionDef(name=name, returns=ast.expr() as said) if _method(inner).kind == "property":
                    pass
                case _:
                    continue
            text = ast.unparse(said)
            if any(re.search(rf"\b{one}\b", text) for one in known):
                yield name, text


def _called(sources: Sources, known: Mapping[str, ast.ClassDef], types: Fields) -> Iterator[tuple[str, Method]]:
    """What we call of the classes looked at, and functions that we import and call."""
    for use in uses_of(OURS, {name: types.get(name, {}) for name in known}):
        if use.arguments is None:
            continue
        for node in _lineage(known[use.owner], known):
            if (method := _methods(node).get(use.name)) is not None:
                yield f"{use.owner}.{use.name}", _shape(method)
                break
    for module, name in imported_names(OURS):
        tree = ast.parse(sources(f"{'/'.join(module.split('.')[1:])}.py") or "")
        for inner in tree.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == name:
                yield f"{module}:{name}", _shape(_method(inner))


def _orders(sources: Sources) -> Iterator[tuple[str, str]]:
    for path in BACKENDS:
        for owner, node in _classes(sources, path).items():
            for name, method in _methods(node).items():
                if _ORDERS.search(name):
                    yield f"{owner}.{name}", method.does


def _shape(method: Method) -> Method:
    """How it is called; what it does is its own affair."""
    return Method(method.parameters, kind=method.kind)


def _record(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in owner.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, ast.unparse(node.value) if node.value is not None else ""
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name, ast.unparse(node.value)
            case _:
                continue


def our_class(file: str, name: str) -> dict[str, Method]:
    """The methods of a class of ``kvferry.vllm``, read in the same way."""
    return _methods(_classes(lambda path: (OURS / path).read_text(), file)[name])


def our_connector() -> dict[str, Method]:
    """The methods of ``FerryConnector``."""
    return our_class("connector.py", "FerryConnector")


def _methods(owner: ast.ClassDef) -> dict[str, Method]:
    return {node.name: _method(node) for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    return Method(
        tuple(_parameters(node.args)),
        must_be_written="abstractmethod" in marks,
        kind=next((kind for kind in ("classmethod", "staticmethod", "property") if kind in marks), ""),
        says=_digest(" ".join((ast.get_docstring(node) or "").split())),
        does=_digest("\n".join(ast.dump(one) for one in body)),
    )


def _parameters(args: ast.arguments) -> Iterator[Parameter]:
    plain = [*args.posonlyargs, *args.args]
    first_default = len(plain) - len(args.defaults)
    for place, arg in enumerate(plain):
        yield Parameter(arg.arg, has_default=place >= first_default)
    if args.vararg is not None:
        yield Parameter(args.vararg.arg, "*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield Parameter(arg.arg, "keyword", default is not None)
    if args.kwarg is not None:
        yield Parameter(args.kwarg.arg, "**")


def _members(owner: ast.ClassDef) -> Iterator[str]:
    """Fields, methods, and what ``__init__`` sets; inherited ones are the base's."""
    for node in owner.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
                if node.name in ("__init__", "__post_init__"):
                    yield from _set_on_self(node)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case _:
                continue


def _set_on_self(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                continue


def _names(text: str) -> set[str]:
    """All names that a module's text binds, at whatever depth: lazy modules bind theirs in tables."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name, asname=None):
                found.add(name)
            case ast.alias(asname=str(name)) | ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                found.add(name)
            case _:
                continue
    return found


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


# ------------------------------------------------------------------------------------------------ the command


def fetch_wheel(release: str, folder: Path) -> Path:
    """Download the wheel of a release, without its dependencies, whatever Python and platform it is for."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", *platforms]
    command += ["--platform", "manylinux1_x86_64", "--python-version", "3.12", "--implementation", "cp"]
    command += ["--abi", "cp38", "--abi", "abi3", "--abi", "cp312", "-d", str(folder), f"vllm=={release}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_contract(contract: Contract, folder: Path) -> Path:
    """One file for each release."""
    path = folder / f"vllm-{contract.release}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(contract), indent=1) + b"\n")
    return path


def read_file(path: Path) -> Contract:
    """The contract in a file."""
    return msgspec.json.decode(path.read_bytes(), type=Contract)


def main() -> None:
    """``python -m kvferry.testing.vllm_contract FOLDER RELEASE...``"""
    folder, releases = Path(sys.argv[1]), sys.argv[2:]
    for release in releases:
        with tempfile.TemporaryDirectory(prefix="kvferry-contract-") as place:
            contract = read_contract(release, wheel_sources(fetch_wheel(release, Path(place))))
        sys.stdout.write(f"{write_contract(contract, folder)}\n")


if __name__ == "__main__":
    main()
