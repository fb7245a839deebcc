"""What only a machine with a GPU can show, in one run of under eight minutes.

python scripts/gpu_check.py              the checks; without a GPU each one says that it was skipped, exit status 0
python scripts/gpu_check.py --rehearse   the same steps on memory of the CPU, to see that the script itself works

Exit status: 0 when nothing failed, 1 when something did, 2 when the time was up. It needs PyTorch for CUDA; vLLM for
the step that reads a layout, and a Mooncake engine built for CUDA for those that move bytes with one. A step that finds
its need missing says so and is skipped, and so is a way of moving bytes that this machine does not have.
"""

import argparse
import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from operator import eq
from types import FrameType, SimpleNamespace
from typing import Any

from kvferry.errors import FerryError, TransportError
from kvferry.layout import Layout, Region
from kvferry.plan import Descriptors
from kvferry.transport import CmaTransport, MooncakeTransport, SubmissionState, wait

LIMIT_S = 470
PAGE = 1 << 22
CHILD_S = 90
PROTOCOLS = ("tcp", "nvlink_intra", "rdma")
MISSING = ("wrong-protocol", "unavailable")
"""Reasons that say that a machine or an engine has not got something, and not that it does it wrongly."""


class MissingNeedError(Exception):
    """A need of a step is not there."""


@dataclass(frozen=True, slots=True)
class Place:
    """The memory that is checked."""

    device: str
    """As torch and layout files spell it: ``cuda:1``, ``cpu``."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch().cuda.synchronize(self.device)

    def reserved(self) -> int:
        """Bytes of it that torch keeps."""
        return int(torch().cuda.memory_reserved(self.device)) if self.on_gpu else 0

    def bytes(self, value: int = 0) -> Any:
        return torch().full((PAGE,), value, dtype=torch().uint8, device=self.device)

    def region(self, tensor: Any) -> Region:
        return Region(tensor.data_ptr(), tensor.numel(), self.device)


def torch() -> Any:
    import torch as found

    return found


def digest(tensor: Any) -> str:
    return hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def need(module: str) -> None:
    if find_spec(module) is None:
        raise MissingNeedError(f"{module} is not installed")


# ------------------------------------------------------------------------------------------------------- the steps


def check_device(place: Place) -> str:
    """Which device, seen by which torch."""
    if not place.on_gpu:
        return f"torch {torch().__version__}, memory of the CPU"
    properties = torch().cuda.get_device_properties(place.device)
    count = torch().cuda.device_count()
    memory = f"{properties.name}, {properties.total_memory:,} bytes"
    return f"torch {torch().__version__}, {place.device} of {count}: {memory}"


def check_layout(place: Place) -> str:
    """vLLM's allocator places caches, kvferry reads their layout; bytes written through the view are found there."""
    need("vllm")
    caches, layout = read_layout(place)
    if {region.memory for region in layout.regions} != {place.device}:
        raise AssertionError(f"the layout says {layout.regions}, the tensors are on {place.device}")
    checked = 0
    for component in layout.components:
        tensor = caches[component.layer]
        tensor.copy_(torch().randn(tensor.shape, device=place.device))
        place.synchronize()
        storage = torch().empty(0, dtype=torch().uint8, device=place.device).set_(tensor.untyped_storage())
        raw = storage.cpu().numpy()
        axes = {axis.name: axis for axis in component.axes}
        for block, head, token in rows(component.num_blocks, axes["head"].count, axes["token"].count):
            at = component.address - storage.data_ptr() + block * component.block_stride
            at += head * axes["head"].stride + token * axes["token"].stride
            want = tensor[block, head, token].contiguous().view(torch().uint8).cpu().numpy()
            if raw[at : at + component.content.nbytes].tobytes() != want.tobytes():
                raise AssertionError(f"{component.layer} block {block} head {head} token {token} lies elsewhere")
            checked += 1
    found = f"{len(layout.components)} components in {len(layout.regions)} regions of {place.device}"
    return f"{found}, {checked:,} rows found"


def read_layout(place: Place) -> tuple[dict[str, Any], Layout]:
    """Two layers of full attention, five blocks of 16 tokens."""
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.kv_cache_interface import KVCacheLayout as Order
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvferry.layout import Parallel
    from kvferry.vllm.layouts.extract import layout_of_worker

    names = ["model.layers.0.attn", "model.layers.1.attn"]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch().bfloat16)
    config = VllmConfig()
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN", get_supported_kernel_block_sizes=lambda spec: [])
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    config.compilation_config.static_forward_context.update(dict.fromkeys(names, layer))
    tensors = [KVCacheTensor(10 * 1024, names, 5 * 1024, 1024)]
    groups = [KVCacheGroupSpec(names, spec)]
    cache = KVCacheConfig(5, tensors, groups, kv_cache_layout="LBHNC")
    caches = allocate_kv_cache(cache, torch().device(place.device), Order["LBHNC"], None)
    parallel = Parallel(0, 1, 0, 1, 0, 1)
    return caches, layout_of_worker(caches, cache, vllm_config=config, engine_id="gpu-check", parallel=parallel)


def rows(*counts: int) -> Iterator[tuple[int, ...]]:
    import itertools

    return itertools.product(*(range(count) for count in counts))


def check_digest(place: Place) -> str:
    """Pages read and summed on the device have the digests of a copy on the host; a changed byte shows."""
    need("vllm")
    caches, layout = read_layout(place)
    for cache in caches.values():
        cache.copy_(torch().randn(cache.shape, device=place.device))
    place.synchronize()
    at_device, at_host = digests_of_both(caches, layout)
    if at_device != at_host:
        raise AssertionError(f"digests made on {place.device} are not those of a copy on the host")
    cache = caches["model.layers.1.attn"]
    cache[3, 1, 5, 3] = -cache[3, 1, 5, 3]
    place.synchronize()
    if digests_of_both(caches, layout)[0] != at_device:
        raise AssertionError("a change in block 3, which was not asked for, shows")
    cache[2, 1, 5, 3] = -cache[2, 1, 5, 3]
    place.synchronize()
    if any(map(eq, digests_of_both(caches, layout)[0], at_device)):
        raise AssertionError("a change in block 2 does not show")
    alone = "" if not place.on_gpu else f", {time_beside_work(place)}"
    return f"{len(at_device)} kinds of digest equal to the host's, a changed byte shows; {time_sums(place)}{alone}"


def digests_of_both(caches: dict[str, Any], layout: Layout) -> tuple[list[object], list[object]]:
    """Of blocks 1, 2 and 4, of bytes and of sums: made where the pages are, and from a copy of them on the host.

    By the threads that make them in an engine.
    """
    from kvferry.layout import Binding, bind_layout
    from kvferry.plan import BlockTable, TransferRequest, compile_plan
    from kvferry.protocol import VerifyAsk
    from kvferry.runtime.digest import page_digest
    from kvferry.runtime.page_reading import HostPages, PageReader
    from kvferry.runtime.verify import Hashers
    from kvferry.runtime.verify_hashing import Digests
    from kvferry.runtime.verify_pages import Job
    from kvferry.vllm.device_pages import DevicePages
    from kvferry.vllm.fence import fence_of

    bound = bind_layout(layout)
    (base,) = bound.binding.bases
    raw = torch().empty(0, dtype=torch().uint8, device=layout.regions[0].memory)
    copy = raw.set_(next(iter(caches.values())).untyped_storage()).cpu().clone()
    tables = (BlockTable.of([1, 2, 4], first_token=0),)
    request = TransferRequest(0, 48, tables, tables)
    plan = compile_plan([bound.placement], [bound.placement])

    async def by_threads(ask: VerifyAsk, reader: PageReader) -> Digests:
        hashers = Hashers(fence_of([layout.regions[0].memory]).enter_thread)
        try:
            return await hashers.digests(Job(plan, (0, 0), request, ask), side="consumer", reader=reader)
        finally:
            await hashers.close()

    def of(reader: PageReader) -> list[object]:
        asks = (VerifyAsk(every=1, seed=1), VerifyAsk(every=1, seed=1, sums=True))
        made: list[object] = [asyncio.run(by_threads(ask, reader)) for ask in asks]
        return [*made, page_digest(bound.placement, bound.placement, request, side="producer", reader=reader)]

    moved = Binding((copy.data_ptr() + base - raw.data_ptr(),))
    return of(DevicePages(caches.values(), bound.binding)), of(HostPages(moved))


def sums_of(place: Place, pages: int) -> Callable[[], Any]:
    """A call that makes the sums of so many pages of 64 KiB."""
    import numpy as np

    from kvferry.layout import Binding, bind_layout
    from kvferry.runtime.page_reading import Rows
    from kvferry.testing.layouts import page, worker
    from kvferry.vllm.device_pages import DevicePages

    tokens, nbytes = 16, 4096
    memory = torch().zeros(pages * tokens * nbytes, dtype=torch().uint8, device=place.device)
    part = page("l0", heads=(0, 1, 1), tokens=tokens, nbytes=nbytes, num_blocks=pages)
    bound = bind_layout(worker([part]))
    reader = DevicePages([memory], Binding((memory.data_ptr(),)))
    block, row = (one.reshape(-1).astype(np.int64) for one in np.indices((pages, tokens)))
    rows_read = Rows(block, np.zeros_like(block), row, block)
    (placed,) = bound.placement.placed
    return lambda: reader.sums(placed, rows_read, (slice(0, 1),))


def time_sums(place: Place) -> str:
    """How fast sums are made, the second time; and that they take no more of the device each time."""
    pages = 4096 if place.on_gpu else 512
    make = sums_of(place, pages)
    before = place.reserved()
    make()
    kept = place.reserved() - before
    began = time.perf_counter()
    make()
    took = time.perf_counter() - began
    for _ in range(40 if place.on_gpu else 0):  # more than torch has streams
        make()
    if place.reserved() - before != kept:
        raise AssertionError(f"the first call set {kept:,} bytes of the device aside, later ones more")
    speed = f"{took * 1e3:.1f} ms ({pages * 65536 / took / 2**30:.1f} GiB/s)"
    return f"sums of {pages * 65536:,} bytes in {speed}, {kept:,} bytes of the device set aside for it"


def time_beside_work(place: Place) -> str:
    """Making sums does not wait for what other streams of the device have to do."""
    make = sums_of(place, 16)
    make()
    torch().cuda._sleep(int(2e9))
    behind = torch().cuda.Event()
    behind.record()
    began = time.perf_counter()
    make()
    took = time.perf_counter() - began
    if behind.query():
        raise AssertionError(f"sums were made in {took * 1e3:.1f} ms, after the work of another stream")
    place.synchronize()
    return f"beside the work of another stream in {took * 1e3:.1f} ms"


def check_fence(place: Place) -> str:
    """A mark is passed after the work before it and not sooner, asked from another thread."""
    need("vllm")
    from kvferry.vllm.fence import fence_of

    fence = fence_of([place.device])
    if not place.on_gpu:
        if fence.mark() is not None:
            raise AssertionError("memory of the CPU has a mark")
        return "memory of the CPU needs no mark"
    tensor = place.bytes()
    torch().cuda._sleep(int(1e9))
    tensor.fill_(7)
    ready = fence.mark()
    began = time.monotonic()
    if ready is None or ready():
        raise AssertionError("the mark was passed while the device still worked")
    found: list[float] = []

    def ask() -> None:
        if fence.enter_thread is not None:
            fence.enter_thread()
        while not ready():
            time.sleep(50e-6)
        found.append(time.monotonic() - began)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(30)
    if not found or int(tensor.min()) != 7:
        raise AssertionError("the mark was not passed in 30 s, or was passed before the work")
    return f"not passed at once, passed {found[0] * 1e3:.1f} ms later, after the write before it"


def check_threads(place: Place) -> str:
    """A thread of the runtime, and those it hands work to, work on the rank's device."""
    if not place.on_gpu:
        raise MissingNeedError("memory of the CPU has no current device")
    from kvferry.runtime.loop import LoopThread
    from kvferry.vllm.fence import fence_of

    loop = LoopThread("gpu-check")
    enter = fence_of([place.device]).enter_thread
    if enter is None:
        raise AssertionError(f"nothing makes {place.device} current")

    async def belong() -> int:
        loop.belong(enter)
        return int(torch().cuda.current_device())

    async def elsewhere() -> int:
        return int(await loop.loop.run_in_executor(None, torch().cuda.current_device))

    try:
        seen = [loop.run(belong(), timeout=30), loop.run(elsewhere(), timeout=30)]
    finally:
        loop.close()
    if seen != [torch().device(place.device).index] * 2:
        raise AssertionError(f"the threads work on devices {seen}, the memory is on {place.device}")
    return f"the loop and its other threads work on {place.device}"


def check_cma(place: Place) -> str:
    """The transport for CPU memory refuses a device's memory by name, and takes the CPU's."""
    engine = CmaTransport()
    tensor = place.bytes()
    try:
        engine.register([place.region(tensor)])
    except TransportError as error:
        if not place.on_gpu:
            raise
        return f"refused, as it must be: {error.message}"
    finally:
        engine.close()
    if place.on_gpu:
        raise AssertionError("cma has taken memory of a device")
    return "memory of the CPU is taken"


def check_mooncake(place: Place, protocol: str) -> str:
    """A child process writes a page into ours through the engine; digests of both ends, and the time."""
    need("mooncake")
    engine = MooncakeTransport("127.0.0.1", protocol=protocol)
    try:
        page = place.bytes()
        place.synchronize()
        engine.register([place.region(page)])
        told = {"device": place.device, "protocol": protocol, "to": engine.address(), "page": page.data_ptr()}
        said = run_child(told)
        place.synchronize()
        if said["digest"] != digest(page):
            raise AssertionError(f"the page that arrived is another ({said})")
        speed = PAGE / said["seconds"] / 2**30
        return f"{PAGE:,} bytes equal at both ends, second write {said['seconds'] * 1e3:.2f} ms ({speed:.2f} GiB/s)"
    finally:
        engine.close()


def run_child(told: dict[str, Any]) -> dict[str, Any]:
    """Run this script as the writer; what it said."""
    words = [sys.executable, __file__, "--write", json.dumps(told)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=CHILD_S, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise AssertionError(f"the writer ended with {done.returncode}: {last[:400]}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def write_page(told: dict[str, Any]) -> None:
    """The writer: another process with its own memory on the same device."""
    place = Place(told["device"])
    engine = MooncakeTransport("127.0.0.1", protocol=told["protocol"])
    page = place.bytes()
    try:
        engine.register([place.region(page)])
        peer = engine.open_peer(told["to"], [Region(told["page"], PAGE, place.device)])
        seconds = 0.0
        for seed in (1, 2):
            page.copy_(torch().randint(0, 256, (PAGE,), dtype=torch().uint8, generator=torch().manual_seed(seed)))
            place.synchronize()
            began = time.perf_counter()
            submission = engine.submit(peer, Descriptors.of([page.data_ptr()], [told["page"]], [PAGE]))
            if wait(submission, timeout_s=30.0) is not SubmissionState.DONE:
                raise AssertionError(str(submission.error or "not done within 30 s"))
            seconds = time.perf_counter() - began
        print(json.dumps({"digest": digest(page), "seconds": seconds}))
    finally:
        engine.close()


def check_same_device(place: Place) -> str:
    """What one device copies within itself: what a path for two engines on one GPU could reach, which is not built."""
    source, target = place.bytes(5), place.bytes()
    target.copy_(source)
    place.synchronize()
    began = time.perf_counter()
    target.copy_(source)
    place.synchronize()
    took = time.perf_counter() - began
    if digest(source) != digest(target):
        raise AssertionError("the copy is another")
    note = "two engines on one GPU: cma is for CPU memory, CUDA IPC is not built, Mooncake is what there is"
    return f"{note}; torch copies {PAGE:,} bytes within {place.device} in {took * 1e3:.3f} ms"


Step = tuple[str, Callable[[Place], str]]
STEPS: tuple[Step, ...] = (
    ("device", check_device),
    ("layout of device tensors", check_layout),
    ("digests on the device", check_digest),
    ("event before the first byte", check_fence),
    ("device of the threads", check_threads),
    ("cma and device memory", check_cma),
    *((f"mooncake {name}", lambda place, name=name: check_mooncake(place, name)) for name in PROTOCOLS),
    ("copy within the device (torch's, kvferry has no such path)", check_same_device),
)


# ------------------------------------------------------------------------------------------------------ the report


def find_place(*, rehearse: bool) -> Place | None:
    """The last GPU, so that a thread that forgot to choose shows; ``None`` for none."""
    if find_spec("torch") is None:
        return None
    if rehearse:
        return Place("cpu")
    count = torch().cuda.device_count() if torch().cuda.is_available() else 0
    return Place(f"cuda:{count - 1}") if count else None


def run_step(step: Step, place: Place | None) -> tuple[str, str]:
    """Verdict and words."""
    if place is None:
        return "skipped", "no GPU is visible to torch here; not run"
    try:
        return "ok", step[1](place)
    except MissingNeedError as missing:
        return "skipped", f"{missing}; not run"
    except FerryError as error:
        return ("skipped" if error.reason.value in MISSING else "failed"), str(error)
    except Exception as error:  # a step that breaks is a result, and the next ones run
        return "failed", f"{type(error).__name__}: {error}"


def time_is_up(signum: int, frame: FrameType | None) -> None:
    print(f"gpu check: stopped, {LIMIT_S} s are over", flush=True)
    raise SystemExit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rehearse", action="store_true", help="run the steps on memory of the CPU")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.write:
        write_page(json.loads(chosen.write))
        return 0
    signal.signal(signal.SIGALRM, time_is_up)
    signal.alarm(LIMIT_S)
    began = time.monotonic()
    place = find_place(rehearse=chosen.rehearse)
    if place is not None and place.on_gpu:
        torch().cuda.set_device(place.device)  # in this thread alone, as vLLM's worker does
    verdicts = []
    for step in STEPS:
        verdict, said = run_step(step, place)
        verdicts.append(verdict)
        print(f"{verdict:8} {step[0]}: {said}", flush=True)
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in ("ok", "skipped", "failed"))
    where = "no GPU" if place is None else place.device
    print(f"gpu check on {where}: {counts}, took {time.monotonic() - began:.0f} s")
    return 1 if "failed" in verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
