"""CUDA tensors: the bytes, the order against the engine's stream, layers, deaths, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_engine import GpuPart, GpuRankProcess, registration, start_gpu_engine
from shared_engine import Engine, EnginePart, kv_part, open_store, scramble, wait_for
from test_round_trip import NUM_SLOTS, PARTS

from flexkv_radix.layerwise import LayerEvents
from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType
from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.pinning import PinnedRange
from flexkv_radix.transfer.protocol import CudaPath, OpKind, RankPlace, TransferDied
from radixshmem.geometry import ComponentType

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

FULL, SWA = ComponentType.FULL, ComponentType.SWA
LAYERFIRST = KVCacheLayoutType.LAYERFIRST


def _part(name: str) -> GpuPart:
    return GpuPart(PARTS[name]())


def _large_part(num_blocks: int = 64) -> GpuPart:
    """36 layers of 32 KiB each for K and V: 2.25 MiB a block."""
    layout = KVCacheLayout(LAYERFIRST, 36, num_blocks, 16, 8, 128)
    return GpuPart(EnginePart(FULL, [layout], [1]))


def _is_dead(engine: Engine) -> bool:
    try:
        engine.handle.poll()
    except TransferDied:
        return True
    return False


@pytest.mark.parametrize("path", [CudaPath.KERNEL, CudaPath.ROWS, CudaPath.BATCH])
@pytest.mark.parametrize(
    ("name", "gap_bytes"), [*((name, 24) for name in PARTS), ("layerfirst", 0), ("blockfirst", 1)]
)
def test_round_trips(name: str, gap_bytes: int, path: CudaPath, tmp_path: Path) -> None:
    """Random blocks and slots, every access width that the addresses allow."""
    part = _part(name)
    rng = np.random.default_rng(17)
    with open_store({FULL: part.model.share_bytes}, NUM_SLOTS, gap_bytes) as store:
        with start_gpu_engine(store, [registration([part], RankPlace())], tmp_path, path=path) as engine:
            slots = store.slots()
            scramble(rng, store.gaps())
            gaps = store.gaps().copy()
            for _ in range(3):
                scramble(rng, slots, *part.model.tensors)
                part.push()
                blocks, ids = rng.permutation(part.model.num_blocks)[:7], rng.permutation(NUM_SLOTS)[:7]
                expected = slots.copy()
                expected[ids] = part.model.blocks()[blocks]
                (result,) = engine.run(engine.op(OpKind.D2H, blocks, ids))
                assert (result.ok, result.error, result.num_bytes) == (True, "", 7 * slots.shape[1])
                assert np.array_equal(slots, expected)
                targets, ids = rng.permutation(part.model.num_blocks)[:7], rng.permutation(NUM_SLOTS)[:7]
                expected_blocks = part.pull()
                expected_blocks[targets] = slots[ids]
                (result,) = engine.run(engine.op(OpKind.H2D, targets, ids))
                assert result.ok, result.error
                assert np.array_equal(part.pull(), expected_blocks)
            assert np.array_equal(store.gaps(), gaps)


@pytest.mark.parametrize(
    ("path", "thread_blocks"),
    [
        (CudaPath.ROWS, 0),
        (CudaPath.BATCH, 0),
        (CudaPath.KERNEL, 1),
        (CudaPath.KERNEL, 5),
        (CudaPath.KERNEL, 64),
    ],
)
def test_large_blocks_and_many_ops_in_flight(path: CudaPath, thread_blocks: int, tmp_path: Path) -> None:
    part = _large_part()
    rng = np.random.default_rng(23)
    with open_store({FULL: part.model.share_bytes}, 64) as store:
        ranks = [registration([part], RankPlace())]
        with start_gpu_engine(store, ranks, tmp_path, thread_blocks=thread_blocks, path=path) as engine:
            scramble(rng, *part.model.tensors)
            part.push()
            blocks, ids = rng.permutation(64), rng.permutation(64)
            stores = [engine.op(OpKind.D2H, blocks[i : i + 8], ids[i : i + 8]) for i in range(0, 64, 8)]
            assert all(result.ok for result in engine.run(*stores))
            assert np.array_equal(store.slots()[ids], part.model.blocks()[blocks])
            expected = part.model.blocks()
            part.tensors[0].zero_()
            torch.cuda.synchronize()
            loads = [engine.op(OpKind.H2D, blocks[i : i + 8], ids[i : i + 8]) for i in range(0, 64, 8)]
            assert all(result.ok for result in engine.run(*loads))
            assert np.array_equal(part.pull(), expected)


def test_tensor_parallel_ranks_in_processes(tmp_path: Path) -> None:
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(2)]
    share = kv_part(LAYERFIRST).share_bytes
    with open_store({FULL: 2 * share}, NUM_SLOTS) as store:
        ranks = [
            GpuRankProcess(f"{tmp_path}/register", i, 40 + i, device) for i, device in enumerate(devices)
        ]
        with start_gpu_engine(store, [], tmp_path, num_ranks=2) as engine:
            before = [rank.ask("blocks") for rank in ranks]
            assert not np.array_equal(before[0], before[1])
            (result,) = engine.run(engine.op(OpKind.D2H, [3, 1], [4, 9]))
            assert result.ok, result.error
            for i in range(2):
                assert np.array_equal(store.slots()[[4, 9], i * share : (i + 1) * share], before[i][[3, 1]])
            for rank in ranks:
                rank.ask("clear")
            (result,) = engine.run(engine.op(OpKind.H2D, [0], [9]))
            assert result.ok, result.error
            for i, rank in enumerate(ranks):
                assert np.array_equal(rank.ask("blocks")[0], before[i][1])
        for rank in ranks:
            rank.close()


def test_full_and_swa(tmp_path: Path) -> None:
    full, swa = GpuPart(kv_part(LAYERFIRST)), GpuPart(kv_part(LAYERFIRST, num_layers=2, component=SWA))
    rng = np.random.default_rng(29)
    with open_store({FULL: full.model.share_bytes, SWA: swa.model.share_bytes}, NUM_SLOTS) as store:
        with start_gpu_engine(store, [registration([full, swa], RankPlace())], tmp_path) as engine:
            for part in (full, swa):
                scramble(rng, *part.model.tensors)
                part.push()
            results = engine.run(engine.op(OpKind.D2H, [2], [5], FULL), engine.op(OpKind.D2H, [4], [7], SWA))
            assert all(result.ok for result in results)
            assert np.array_equal(store.slots(FULL)[5], full.model.block(2))
            assert np.array_equal(store.slots(SWA)[7], swa.model.block(4))


@pytest.mark.parametrize("path", [CudaPath.KERNEL, CudaPath.ROWS, CudaPath.BATCH])
def test_stores_wait_for_the_step_that_writes_the_blocks(path: CudaPath, tmp_path: Path) -> None:
    """The engine's stream is still asleep when the store is submitted; the event makes it wait."""
    part = GpuPart(kv_part(LAYERFIRST))
    event = torch.cuda.Event(interprocess=True)
    handle = event.ipc_handle()
    with open_store({FULL: part.model.share_bytes}, NUM_SLOTS) as store:
        ranks = [registration([part], RankPlace(), handle)]
        with start_gpu_engine(store, ranks, tmp_path, path=path) as engine:
            engine.run(engine.op(OpKind.D2H, [0], [0]))
            assert not store.slots()[0].any()
            torch.cuda._sleep(600_000_000)  # about 0.3 s
            part.tensors[0].fill_(7)
            event.record()
            (result,) = engine.run(engine.op(OpKind.D2H, [1], [1]))
            assert result.ok
            assert (store.slots()[1] == 7).all()


def test_without_an_event_stores_do_not_wait(tmp_path: Path) -> None:
    """The negative control of the test above: the sleep is long enough to be seen."""
    part = GpuPart(kv_part(LAYERFIRST))
    with open_store({FULL: part.model.share_bytes}, NUM_SLOTS) as store:
        with start_gpu_engine(store, [registration([part], RankPlace())], tmp_path) as engine:
            engine.run(engine.op(OpKind.D2H, [0], [0]))
            torch.cuda._sleep(600_000_000)
            part.tensors[0].fill_(7)
            engine.run(engine.op(OpKind.D2H, [1], [1]))
            assert not store.slots()[1].any()
            torch.cuda.synchronize()


@pytest.mark.parametrize("path", list(CudaPath))
def test_layers_are_signalled_when_their_bytes_are_there(path: CudaPath, tmp_path: Path) -> None:
    part = _large_part()
    rng = np.random.default_rng(31)
    with open_store({FULL: part.model.share_bytes}, 64) as store:
        ranks = [registration([part], RankPlace())]
        with start_gpu_engine(store, ranks, tmp_path, layerwise=True, path=path) as engine:
            events = LayerEvents(36)
            events.connect(f"{tmp_path}/layerwise", 0, 1)
            scramble(rng, store.slots())
            layers = store.slots().reshape(64, 36, 2, -1)
            view = part.tensors[0].reshape(36, 2, 64, -1)
            for counter_id, n in ((0, 64), (1, 5), (2, 1), (0, 64)):  # layers alone, some together, all
                part.tensors[0].zero_()
                torch.cuda.synchronize()
                events.reset(counter_id)
                ids = rng.permutation(64)
                op = engine.op(OpKind.H2D, np.arange(n), ids[:n], layerwise=True, counter_id=counter_id)
                engine.handle.submit([op])
                for layer in range(36):
                    events.wait(counter_id, layer, 10.0)
                    here = view[layer].transpose(0, 1)[:n].cpu().numpy()
                    assert np.array_equal(here, layers[ids[:n], layer]), f"layer {layer}"
                wait_for(lambda: bool(engine.handle.poll(0.01)), "the op's result")
            events.reset(1)
            (result,) = engine.run(engine.op(OpKind.H2D, [], [], layerwise=True, counter_id=1))
            assert result.ok
            for layer in range(36):
                events.wait(1, layer, 1.0)
            events.close()


def test_the_client_is_marked_before_slots_are_pinned(tmp_path: Path) -> None:
    part, marks = GpuPart(kv_part(LAYERFIRST)), []
    with open_store({FULL: part.model.share_bytes}, NUM_SLOTS) as store:
        with start_gpu_engine(store, [registration([part], RankPlace())], tmp_path, marks=marks):
            assert marks == [1]


def test_bad_indices_fail_and_the_next_op_works(tmp_path: Path) -> None:
    part = GpuPart(kv_part(LAYERFIRST))
    with open_store({FULL: part.model.share_bytes}, NUM_SLOTS) as store:
        with start_gpu_engine(store, [registration([part], RankPlace())], tmp_path) as engine:
            bad, good = engine.run(engine.op(OpKind.D2H, [99], [0]), engine.op(OpKind.D2H, [1], [0]))
            assert (bad.ok, good.ok) == (False, True)


def test_a_killed_worker_is_noticed_and_another_takes_its_place(tmp_path: Path) -> None:
    part = _large_part()
    with open_store({FULL: part.model.share_bytes}, 64) as store:
        rank = registration([part], RankPlace())
        with start_gpu_engine(store, [rank], tmp_path) as engine:
            ids = np.arange(64)
            engine.handle.submit([engine.op(OpKind.D2H, ids, ids) for _ in range(50)])
            os.kill(engine.handle.pid, signal.SIGKILL)
            wait_for(lambda: _is_dead(engine), "the worker's death")
        scramble(np.random.default_rng(37), *part.model.tensors)
        part.push()
        with start_gpu_engine(store, [rank], tmp_path) as engine:
            (result,) = engine.run(engine.op(OpKind.D2H, ids, ids))
            assert result.ok, result.error
            assert np.array_equal(store.slots(), part.model.blocks())


def test_pinning_rolls_back_when_a_chunk_is_refused() -> None:
    """The third chunk is pinned already: the driver refuses it and the first two are given back."""
    device = cuda_driver.Device.at(0)
    device.activate()
    memory = torch.zeros(4 << 20, dtype=torch.uint8)
    address = (memory.data_ptr() + 4095) & ~4095
    chunk = 1 << 20
    driver = (cuda_driver.host_register, cuda_driver.host_unregister)
    ends = [chunk, 2 * chunk, 3 * chunk]
    blocker = PinnedRange(address + 2 * chunk, [4096], *driver)
    with pytest.raises(cuda_driver.CudaError, match="ALREADY_REGISTERED"):
        PinnedRange(address, ends, *driver)
    blocker.close()
    PinnedRange(address, ends, *driver).close()


def test_memory_that_cannot_be_shared_names_the_setting() -> None:
    code = (
        "import torch\nfrom flexkv_radix.transfer.tensors import share_tensors\n"
        "tensor = torch.zeros(1 << 22, device='cuda')\n"
        "try:\n    share_tensors([tensor])\nexcept RuntimeError as error:\n    print(error)\n"
    )
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "expandable_segments" in output.stdout, output.stderr
