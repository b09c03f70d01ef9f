"""Where state lives and how much memory a step takes: bounds, offloading, momentum on the CPU and on disk."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import peak_of
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon import Exchange, Muon, Orthogonalizer, Storage
from shardmuon._torch import dtensor_around
from shardmuon.engines import engine_of
from shardmuon.momentum.disk import MappedFile, Need
from shardmuon.momentum.keeper import offloaded_from
from shardmuon.orthogonalize import orthogonalize
from shardmuon.ranks import exchange
from shardmuon.testing.cases import ParamCase, groups_of
from shardmuon.testing.layouts import LAYOUTS, mesh_of
from shardmuon.testing.pool import RankPool, get_pool
from shardmuon.testing.tolerances import assert_bitwise, assert_same_update

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 2**20


# ------------------------------------------------------------------------------------------- what a step allocates

SHAPES = [(128, 256)] * 16 + [(256, 128)] * 8 + [(128, 128)] * 12
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),)


def _step_peak(layout: str, bucket_bytes: int, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Peak of the second step; two buckets and the work space, from the plan; matrices of the largest bucket."""
    cases = {f"w{i}": ParamCase(shape, "") for i, shape in enumerate(SHAPES)}
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
    method: Any = options.get("method", "standard")
    mesh = LAYOUTS[layout].mesh(dist.get_world_size())
    params = {name: nn.Parameter(t) for name, t in LAYOUTS[layout].build(full, mesh).items()}
    group = dist.group.WORLD if LAYOUTS[layout].process_group else None
    # sizes below are of fp32 products and of a wire of 4 bytes
    asked: dict[str, Any] = {
        "exchange": Exchange(bucket_bytes=bucket_bytes),
        "ns_steps": 1,
        "orthogonalizer": Orthogonalizer(method, FP32),
        "storage": options.get("storage", Storage()),
    }
    optimizer = Muon(groups_of(params, cases), lr=1e-3, process_group=group, **asked)
    for name, grad in LAYOUTS[layout].build(full, mesh).items():
        params[name].grad = grad
    del full
    optimizer.step()
    peak = peak_of(optimizer.step)
    buckets, work, matrices = [], [], []
    for b in optimizer.plan.for_rank(dist.get_rank()):
        owned = [optimizer.plan.items[i] for i in b.owned]
        own = 4 * sum(item.rows * item.cols for item in owned)
        gather = sum(b.gather.send_splits) + sum(b.gather.recv_splits) if b.gather else 0
        scatter = sum(b.scatter.send_splits) + sum(b.scatter.recv_splits) if b.scatter else 0
        buckets.append(own + 4 * max(gather, scatter))
        matrices.append(own)
        if owned:
            m, n = min(owned[0].rows, owned[0].cols), max(owned[0].rows, owned[0].cols)
            batch = torch.empty(own // (4 * m * n), m, n).normal_()
            work.append(own + peak_of(lambda x=batch: orthogonalize(x, COEFFICIENTS, method=method, dtype=FP32)))
    return peak, 2 * max(buckets), max(work), max(matrices)


@pytest.mark.parametrize(
    ("layout", "world", "options"),
    [
        ("fsdp2", 2, {}),
        ("fsdp2", 2, {"storage": Storage(momentum_dtype=BF16)}),
        ("fsdp2", 2, {"storage": Storage(momentum_dtype="int8")}),
        ("ddp", 2, {}),
        ("fsdp2", 4, {}),
        ("hsdp", 4, {}),
        ("fsdp2", 2, {"method": "gram"}),
    ],
    ids=str,
)
def test_a_step_takes_two_buckets_and_the_work_space(layout: str, world: int, options: Any) -> None:
    sizes = (MIB // 8, MIB // 2)
    small, large = (get_pool(world).run(_step_peak, layout, size, options) for size in sizes)
    # what the momentum of 2**17 elements makes, whatever the bucket
    portion = 2 * MIB if "storage" in options else MIB // 2
    for size, found in zip(sizes, (small, large), strict=True):
        for peak, two_buckets, work, matrices in found:
            assert matrices <= size
            assert peak <= two_buckets + max(work, two_buckets // 2 + portion)
            copies = {"fsdp2": 1, "hsdp": 2, "ddp": world}[layout]
            # its matrices, and what goes to or comes from every copy; owners differ by less than a tenth
            assert two_buckets <= 2 * (1 + 2.2 * copies) * size
            assert work <= 5 * size
    # and it is the bucket that decides, not the model; four ranks cut the model into four buckets, smaller than asked
    if not options and world == 2:
        assert max(p for p, *_ in small) < 0.6 * max(p for p, *_ in large)


# ---------------------------------------------------------------------------------------------------- on disk


def _params(dtype: torch.dtype = FP32, num: int = 6, shape: tuple[int, int] = (64, 384)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(num)]


def _run(optimizer: Muon, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def _equal(first: Muon, second: Muon) -> bool:
    pairs = zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True)
    return all(
        torch.equal(a, b)
        and first.state[a].keys() == second.state[b].keys()
        and all(torch.equal(v, second.state[b][k]) for k, v in first.state[a].items())
        for a, b in pairs
    )


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [None, FP32, BF16, "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_elsewhere_gives_the_same_bits(place: str, dtype: Any, nesterov: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "ns_steps": 2}
    where = "cpu" if place == "cpu" else f"disk:{tmp_path}"
    here, there = (Muon(_params(BF16), storage=Storage(dtype, at), **options) for at in (None, where))
    _run(here, range(3))
    _run(there, range(3))
    assert _equal(here, there)
    assert [p.name for p in tmp_path.iterdir()] == ([] if place == "cpu" else ["momentum-rank0.bin"])


def _resident(path: Path) -> int:
    """Bytes of the mapped file that are in this process's memory."""
    text = Path("/proc/self/smaps").read_text()
    entries = re.findall(rf"^\S+ .*{re.escape(str(path))}\n(?:Size.*\n|\S*PageSize.*\n)*Rss:\s+(\d+) kB", text, re.M)
    assert entries, "the file is not mapped"
    return 1024 * sum(map(int, entries))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_slot_that_is_dropped_is_in_memory_no_longer_and_keeps_its_values(tmp_path: Path) -> None:
    """One slot in the file: what the system reads ahead for a neighbour is not counted here."""
    file = MappedFile(str(tmp_path), "momentum", [Need((512, 512), FP32)])
    file.tensors[0].fill_(3.0)
    assert _resident(file.path) > 0
    file.drop(0)
    assert _resident(file.path) == 0
    assert bool((file.tensors[0] == 3.0).all())


class _Touched(TorchDispatchMode):
    """Bytes of slots that an operation has read or written and that have not been dropped since, and the most so far.

    What the code does, not what the system has mapped at the moment: that hangs on other processes.
    """

    def __init__(self, file: MappedFile) -> None:
        super().__init__()
        self.slots = {t.untyped_storage().data_ptr(): at for at, t in enumerate(file.tensors)}
        self.sizes = [need.nbytes for need in file.needs]
        self.now: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:  # a view reads nothing
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.slots:
                    self.now.add(self.slots[value.untyped_storage().data_ptr()])
            self.most = max(self.most, sum(self.sizes[slot] for slot in self.now))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [FP32, "int8"])
def test_no_more_than_two_buckets_of_momentum_on_disk_are_in_memory(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = 2 * MIB
    params = _params(num=32, shape=(256, 512))
    stored_in: dict[str, Any] = {"storage": Storage(momentum_dtype=dtype, momentum_device=f"disk:{tmp_path}")}
    optimizer = Muon(
        params,
        lr=1e-3,
        exchange=Exchange(bucket_bytes=bucket),
        ns_steps=1,
        orthogonalizer=Orthogonalizer(dtype=FP32),
        **stored_in,
    )  # 4 bytes on the wire
    _run(optimizer, range(1))
    file = optimizer.keeper._file
    assert file is not None
    touched = _Touched(file)
    drop = MappedFile.drop

    def watched(self: MappedFile, slot: int) -> None:
        touched.now.discard(slot)
        drop(self, slot)

    monkeypatch.setattr(MappedFile, "drop", watched)
    with touched:
        _run(optimizer, range(1, 2))
    assert file.size >= 32 * 256 * 512 * (4 if dtype == FP32 else 1)
    a_bucket = bucket if dtype == FP32 else bucket / 4 * 1.04
    assert a_bucket / 2 <= touched.most <= 2 * a_bucket
    assert touched.now == set()
    assert bool(optimizer.state[params[0]]["momentum_buffer"].any())  # read again from the file


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_checkpoint_of_momentum_on_disk_resumes_with_the_same_bits(dtype: Any, tmp_path: Path) -> None:
    one = Muon(_params(), lr=0.02, storage=Storage(dtype, f"disk:{tmp_path}/a"))
    _run(one, range(3))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    weights = [p.detach().clone() for p in one.param_groups[0]["params"]]
    _run(one, range(3, 5))
    for place in (f"disk:{tmp_path}/b", None):
        file.seek(0)
        two = Muon(_params(), lr=0.02, storage=Storage(dtype, place))
        _run(two, range(7, 8))  # something to be overwritten
        for p, w in zip(two.param_groups[0]["params"], weights, strict=True):
            p.data.copy_(w)
        two.load_state_dict(torch.load(file))
        _run(two, range(3, 5))
        assert _equal(one, two)
        on_disk = place is not None
        assert [p.name for p in (tmp_path / "b").iterdir()] == ["momentum-rank0.bin"] * on_disk


def test_momentum_moves_on_when_parameters_are_added_and_its_file_goes_with_the_optimizer(tmp_path: Path) -> None:
    here, there = (
        Muon(_params(), lr=0.02),
        Muon(_params(), lr=0.02, storage=Storage(momentum_device=f"disk:{tmp_path}")),
    )
    for optimizer in (here, there):
        _run(optimizer, range(2))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8, 16))]})
        _run(optimizer, range(2, 4))
    assert _equal(here, there)
    file = there.keeper._file
    assert file is not None and file.size == sum(-(-n.nbytes // 4096) * 4096 for n in file.needs)
    assert len(file.needs) == 7
    del there, file, optimizer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_two_optimizers_cannot_share_a_folder(tmp_path: Path) -> None:
    one, two = (Muon(_params(), lr=0.02, storage=Storage(momentum_device=f"disk:{tmp_path}")) for _ in range(2))
    _run(one, range(1))
    before = copy.deepcopy(two.param_groups[0]["params"])
    with pytest.raises(ValueError, match="another optimizer keeps its momentum there"):
        _run(two, range(1))
    assert all(torch.equal(a, b) for a, b in zip(before, two.param_groups[0]["params"], strict=True))
    assert not two.state
    with pytest.raises(ValueError, match="another optimizer keeps its momentum there"):
        _run(copy.deepcopy(one), range(1))
    _run(one, range(1, 2))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_before_anything_changes(tiny_disk: Path) -> None:
    optimizer = Muon(_params(num=32), lr=0.02, storage=Storage(momentum_device=f"disk:{tiny_disk}"))
    before = copy.deepcopy(optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match=r"cannot reserve \d+ bytes in .*momentum-rank0.bin .*No space left on device"):
        _run(optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert not optimizer.state
    assert list(tiny_disk.iterdir()) == []  # what had been reserved is free again
    fits = Muon(_params(num=32), lr=0.02, storage=Storage(momentum_device=f"disk:{tiny_disk}", momentum_dtype="int8"))
    _run(fits, range(1))


def _no_space(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _broken_disk(folder: str, how: str) -> tuple[str, bool, bool]:
    """What rank 1's disk does to both ranks: the error, whether weights are as before, whether a retry works."""
    built = LAYOUTS["fsdp2"].build({"w": torch.ones(6, 256)}, (dist.get_world_size(),))
    w = nn.Parameter(built["w"])
    assert isinstance(w, DTensor)
    optimizer = Muon([("w", w)], lr=0.02, storage=Storage(momentum_device=f"disk:{folder}"))

    def step() -> None:
        w.grad = LAYOUTS["fsdp2"].build({"w": torch.full((6, 256), 2.0)}, (dist.get_world_size(),))["w"]
        optimizer.step()

    reserve = os.posix_fallocate
    if how == "full":
        if dist.get_rank() == 1:
            os.posix_fallocate = _no_space
    else:
        step()
        path = Path(folder) / "momentum-rank1.bin"
        if dist.get_rank() == 1:
            if how == "vanished":
                path.unlink()
            elif how == "replaced":
                path.unlink()
                path.write_bytes(b"0" * 8192)
            else:
                os.truncate(path, 100)
    before = w.to_local().detach().clone()
    try:
        step()
        message = ""
    except ValueError as error:
        message = str(error)
    finally:
        os.posix_fallocate = reserve
    unchanged = torch.equal(before, w.to_local())
    again = how != "full"
    if how == "full":
        step()
        again = not torch.equal(before, w.to_local())
    return message, unchanged, again


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("full", "cannot reserve 4096 bytes"),
        ("vanished", "is not as it was made: No such file"),
        ("replaced", "is not as it was made: another file stands in its place"),
        ("cut", "is not as it was made: it has 100 bytes instead of 4096"),
    ],
)
def test_a_disk_that_fails_on_one_rank_is_an_error_on_both(
    how: str, text: str, world2: RankPool, tmp_path: Path
) -> None:
    for message, unchanged, again in world2.run(_broken_disk, str(tmp_path / how), how):
        assert text in message and "momentum-rank1.bin" in message
        assert unchanged and again


@pytest.mark.parametrize("given", ["gpu", "disk:", "disk", 3])
def test_an_unknown_place_or_dtype_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"momentum_device=.* is not one of None, 'cpu', 'disk:/some/folder'"):
        Muon(_params(), lr=1e-3, storage=Storage(momentum_device=given))
    with pytest.raises(ValueError, match=r"momentum_dtype=.* is not one of None, torch.float32"):
        Muon(_params(), lr=1e-3, storage=Storage(momentum_dtype=torch.float16))


# --------------------------------------------------------------------------------------------------- with FSDP2


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(24, 33, bias=False), nn.Linear(33, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def _fsdp(policy: dict[str, Any], options: dict[str, Any]) -> list[tuple[Tensor, Tensor, bool]]:
    """Three steps; per parameter the whole weight, what one process makes of the same gradients, and whether weights,
    gradients and momentum are fp32 on the CPU."""
    net = _Net()
    fully_shard(net, mesh=mesh_of((dist.get_world_size(),)), **policy)
    twin = _Net()
    ours = Muon(list(net.named_parameters()), lr=0.02, deterministic=True, **options)
    dense = Muon(list(twin.named_parameters()), lr=0.02, deterministic=True)
    good = True
    for number in range(3):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        net(x).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            q.grad = p.grad.full_tensor()
            good &= p.dtype == p.grad.dtype == FP32 and p.device.type == p.grad.device.type == "cpu"
        ours.step()
        dense.step()
        net.zero_grad()
    out = []
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert isinstance(p, DTensor)
        momentum = ours.state[p]["momentum_buffer"]
        good &= isinstance(momentum, DTensor) and momentum.dtype == FP32 and momentum.device.type == "cpu"
        out.append((p.full_tensor().detach(), q.detach(), good))
    return out


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
        (
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {"storage": Storage(momentum_device="cpu"), "orthogonalizer": Orthogonalizer(device="cpu")},
        ),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, {}),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)}, {}),
    ],
    ids=["offload", "offload, all on the CPU", "bf16 compute", "bf16 compute and reduction"],
)
def test_fsdp_policies_keep_fp32_masters_and_exact_updates(policy: Any, options: Any, world2: RankPool) -> None:
    for found in world2.run(_fsdp, policy, options):
        for weight, expected, good in found:
            assert torch.equal(weight, expected)
            assert good


def _offloaded_state() -> tuple[str, str, str]:
    """What CPUOffloadPolicy makes on a CUDA mesh, without a CUDA device: a DTensor whose storage is on the CPU."""
    mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()), _init_backend=False)
    w = nn.Parameter(dtensor_around(torch.ones(2, 4), mesh, (Shard(0),), torch.Size((4, 4)), (4, 1)))
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0
    try:
        home = offloaded_from(w)
    finally:
        torch.cuda.current_device = current
    wrapped = engine_of(w).wrap(torch.zeros(2, 1), w, (4, 1))
    assert isinstance(wrapped, DTensor)
    return str(home), str(wrapped.to_local().device), str(tuple(wrapped.shape))


def test_state_of_offloaded_parameters_stays_on_the_cpu(world2: RankPool) -> None:
    assert world2.run(_offloaded_state) == [("cuda:0", "cpu", "(4, 1)")] * 2


@pytest.mark.parametrize(
    ("config", "preferred", "wire", "talk"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", "cpu", "cpu"),  # gloo moves no CUDA tensors in an all-to-all
        ("cpu:gloo,cuda:nccl", "cuda", "cuda", "cpu"),
        ("cuda:nccl", "cuda", "cuda", "cuda:1"),
        ("cuda:nccl", None, "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", None, "cpu", "cpu"),
    ],
)
def test_buffers_live_where_the_group_can_move_them(
    config: str, preferred: str | None, wire: str, talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "group_for", lambda ranks: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    cpu, there = torch.device("cpu"), None if preferred is None else torch.device(preferred)
    assert exchange.wire_device(cpu, there, (0, 1)) == torch.device(wire)
    assert exchange.talking_device(cpu, None) == torch.device(talk)
    assert exchange.wire_device(cpu, there, (0,)) == (there or cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parameters_on_the_cpu_are_orthogonalized_on_the_accelerator() -> None:
    offloaded, there = _params(num=3), [nn.Parameter(p.detach().cuda()) for p in _params(num=3)]
    one = Muon(
        offloaded,
        lr=0.02,
        orthogonalizer=Orthogonalizer(device="cuda", dtype=FP32),
        deterministic=True,
        exchange=Exchange(dtype=FP32),
    )
    two = Muon(
        there,
        lr=0.02,
        orthogonalizer=Orthogonalizer(dtype=FP32),
        deterministic=True,
        exchange=Exchange(dtype=FP32),
        storage=Storage(momentum_device="cpu"),
    )
    torch.cuda.reset_peak_memory_stats()
    for number in range(2):
        before = [p.detach().clone() for p in offloaded]
        _run(one, range(number, number + 1))
        for p, q, start in zip(offloaded, there, before, strict=True):
            q.data.copy_(start)  # each step from the same weights: nothing of an earlier one's rounding is left
            q.grad = p.grad.cuda()  # type: ignore[union-attr]
        two.step()
        for p, q, start in zip(offloaded, there, before, strict=True):
            kept = two.state[q]["momentum_buffer"]
            assert kept.device.type == "cpu"
            assert p.grad is not None
            pushed = p.grad.lerp(kept, 0.95)
            assert_same_update(p, q, before=start, lr=0.02, weight_decay=0.1, dtype=FP32, matrix=pushed)
    assert torch.cuda.max_memory_allocated() > 0


def _nccl_only() -> bool:
    with RankPool(1, backend="nccl") as pool:
        return pool.run(_offloaded_over_nccl)[0]


def _offloaded_over_nccl() -> bool:
    """FSDP2 keeps shards on the CPU in a job whose only backend is NCCL."""
    net = _Net().cuda()
    fully_shard(net, mesh=mesh_of((1,), "cuda"), offload_policy=CPUOffloadPolicy())
    optimizer = Muon(list(net.named_parameters()), lr=0.02)
    net(torch.randn(4, 24, device="cuda")).square().mean().backward()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    return all(
        p.device.type == "cpu" and not torch.equal(a.to_local(), p.to_local())
        for a, p in zip(before, net.parameters(), strict=True)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_shards_are_stepped_over_nccl_alone() -> None:
    assert _nccl_only()


@pytest.mark.parametrize("at", [(), (2,), (0, 1, 2, 3)])
def test_momentum_on_disk_follows_its_gradients_dtype(tmp_path: Path, at: tuple[int, ...]) -> None:
    kept = []
    for place in (None, f"disk:{tmp_path}"):
        generator = torch.Generator().manual_seed(0)
        w = nn.Parameter(torch.randn(16, 24, generator=generator))
        w.grad_dtype = None  # its gradient may be of any dtype
        optimizer = Muon(
            [("w", w)], lr=0.1, orthogonalizer=Orthogonalizer(dtype="float32"), storage=Storage(momentum_device=place)
        )
        for step in range(4):
            grad = torch.randn(16, 24, generator=generator)
            w.grad = grad.bfloat16() if step in at else grad
            optimizer.step()
        kept.append((w.detach().clone(), optimizer.state[w]["momentum_buffer"].clone()))
    assert_bitwise(kept[1], kept[0])
