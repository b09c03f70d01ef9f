"""`shardmuon tune --hardware OUT.yaml`: measure this machine, and write what `shardmuon plan --gpu OUT.yaml` reads."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardmuon.foresight import measuring
from shardmuon.foresight.hardware import SCALARS
from shardmuon.foresight.hardware_files import save
from shardmuon.foresight.measuring import Sample
from shardmuon.orthogonalize.choice import candidates
from shardmuon.orthogonalize.schedules import schedule
from shardmuon.orthogonalize.tuning import device_key, kernels
from shardmuon.testing.pool import RankPool

SHORT = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
ASPECTS = (1.0, 3.0, 4.0)
FRAGMENTS = {"cpu": (1 << 7, 1 << 12, 1 << 16, 1 << 18, 1 << 20), "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24)}
BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_LARGEST_FLOPS = {"cpu": 1.5e10, "cuda": 1e15}  # of one call that is timed
_AT_ONCE = (256, 3)  # short side and how often: matrices of the tables, so that others may be held out
_BESIDE = (384, 1152)
Run = Callable[..., list[Any]]  # calls a function of `measuring` on all ranks


def measure(path: Path, device: torch.device, ranks: Sequence[int], seconds: float, say: Callable[[str], None]) -> None:
    """Measure and write the file.

    Args:
        path: Where to.
        device: What to measure.
        ranks: Of how many ranks exchanges are measured.
        seconds: To spend on each product, pass and copy.
        say: Is told what is being done.

    Under torchrun its ranks, on as many machines as they are, measure exchanges among all of them, and rank 0 the rest.
    """
    if join(device):
        ranks = (dist.get_world_size(),)
        if dist.get_rank():
            _together(device, ranks, schedule("keller", None).triples, lambda text: None)
            return
    steps = schedule("keller", None).triples
    peaks, tables = _products(device, steps, seconds, say)
    say("passes over memory")
    passes = _passes(device, seconds)
    copy = measuring.copies(device, seconds)
    few, many = 8, 200
    small, large = measuring.whole_steps((few, many), device, max(seconds, 0.5))
    each = Sample(*((b - a) / (many - few) for a, b in zip(small, large, strict=True)))
    facts: dict[str, Any] = {
        "memory_bytes": _value(_memory(device)),
        "memory_bandwidth": _value(1 / copy.lo),
        "memory_efficiency": _span(copy.lo / copy.hi, 1.0),
        "host_matrix": _span(*_beside(each, passes)),
        "host_step": _span(max(0.0, small.lo - few * each.lo), max(0.0, small.hi - few * each.lo)),
        "host_bucket": _span(0.0, 0.0, "in host_step and in the latency of exchanges"),
        "launch": _span(0.0, 0.0, "in the tables of products"),
        "mfu": _span(0.2, 0.6, "assumption: share of the measured peak that training reaches"),
    }
    facts["mfu"]["verified"] = False
    found, spoken, together, share = _together(device, ranks, steps, say)
    facts |= _links(found, spoken, share, max(ranks))
    save(
        {
            "name": path.stem,
            "title": f"{_device_name(device)}, measured",
            "device": device.type,
            "flops": peaks,
            "facts": {key: facts[key] for key in SCALARS},
            "products": tables,
            "exchanges": found,
            "passes": passes,
            **({"together": together} if together else {}),
            "notes": f"{device_key(device)}; {platform.machine()}, {os.cpu_count()} processors; one thread a rank.",
        },
        path,
    )


def join(device: torch.device) -> bool:
    """Whether torchrun started this process as one of several ranks; then they have a process group."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return False
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return True


_SOURCE = "measured by shardmuon tune --hardware"


def _value(value: float) -> dict[str, Any]:
    return {"value": value, "source": _SOURCE, "verified": True}


def _span(low: float, high: float, source: str = _SOURCE) -> dict[str, Any]:
    return {"low": low, "high": high, "source": source, "verified": True}


def _table(rows: Iterable[Sequence[float]], **more: Any) -> dict[str, Any]:
    return {
        **more,
        "rows": [[float(f"{value:.5g}") for value in row] for row in rows],
        "source": _SOURCE,
        "verified": True,
    }


def _products(
    device: torch.device, steps: Any, seconds: float, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Peaks by dtype, and the share of them that each choice reaches at each shape."""
    limit = _LARGEST_FLOPS.get(device.type, 1e15)
    shorts = SHORT["cpu" if device.type == "cpu" else "cuda"]
    rates: dict[tuple[str, str, float], list[tuple[int, Sample]]] = {}  # what, dtype, aspect -> (short, FLOP/s)
    exact = candidates(device, torch.float32, ("torch",))[:1]  # what deterministic tests and fp32 jobs take
    for choice in dict.fromkeys((*candidates(device, None, kernels(device)), *exact)):
        dtype = str(choice.dtype).removeprefix("torch.")
        say(f"products, {choice}")
        for aspect in ASPECTS:
            for short in shorts:
                flops, found = measuring.products(str(choice), short, int(short * aspect), steps, device, seconds)
                rates.setdefault((str(choice), dtype, aspect), []).append((short, Sample(*(flops / s for s in found))))
                if flops * 6 > limit:
                    break
    for kind in (torch.float32, torch.float64):
        name = str(kind).removeprefix("torch.")
        say(f"products, {name}")
        for short in shorts:
            flops, found = measuring.bare_products(short, kind, device, seconds)
            rates.setdefault((name, name, 1.0), []).append((short, Sample(*(flops / s for s in found))))
            if flops * 6 > limit:
                break
    peaks: dict[str, float] = {}
    for (_, dtype, _), rows in rates.items():
        peaks[dtype] = max(peaks.get(dtype, 0.0), *(rate.lo for _, rate in rows))  # `lo` is of the least time
    tables = [
        _table(
            [(short, rate.hi / peaks[dtype], rate.mid / peaks[dtype], rate.lo / peaks[dtype]) for short, rate in rows],
            of=what,
            aspect=aspect,
        )
        for (what, dtype, aspect), rows in rates.items()
    ]
    return {dtype: _value(float(f"{peak:.5g}")) for dtype, peak in peaks.items()}, tables


def _passes(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    rows: dict[str, list[tuple[float, ...]]] = {"pack": [], "apply": [], "adamw": []}
    for fragment in FRAGMENTS["cpu" if device.type == "cpu" else "cuda"]:
        pack, apply = measuring.passes(fragment, device, seconds)
        rows["pack"].append((fragment, *pack))
        rows["apply"].append((fragment, *apply))
        rows["adamw"].append((fragment, *measuring.adamw(fragment, device, seconds)))
    return [_table(found, of=what) for what, found in rows.items()]


def _beside(each: Sample, passes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """What a matrix of 8 x 16 takes beside its passes: its products are part of it, and take next to nothing."""
    packed = sum(128 * row["rows"][0][2] for row in passes if row["of"] != "adamw")
    low, high = max(0.0, each.lo - packed), max(0.0, each.hi - packed)
    return min(low, high), max(low, high)


def _together(
    device: torch.device, counts: Sequence[int], steps: Any, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[Sample], dict[str, Any] | None, list[float]]:
    """Exchanges by number of ranks, agreements, what computing at once costs, and how much of an exchange hides."""
    how = str(candidates(device, None, kernels(device))[0])
    found, spoken, factors, shares = [], [], [], []
    alone: Sample | None = None
    for count in counts:
        with ExitStack() as stack:
            run = _runner(stack, count, device)
            say(f"{count} ranks")
            place = device if device.type == "cpu" else torch.device(device.type)
            at_once: Sample = run(measuring.at_once, *_AT_ONCE, place, 25)[0]
            alone = alone or at_once
            factors.append((count, *(max(1.0, a / alone.mid) for a in at_once)))
            if count > 1:
                rows = run(measuring.exchanges, BYTES, place, 15)[0]
                found.append(_table(((size, *row) for size, row in zip(BYTES, rows, strict=True)), ranks=count))
                spoken.append(run(measuring.agreements, place, 25)[0].per(math.log2(count)))
                shares += run(measuring.overlap, how, *_BESIDE, steps, 1 << 23, place, 4)[0]
    slower = _table(factors) if device.type == "cpu" and counts else None
    return found, spoken, slower, shares


def _runner(stack: ExitStack, count: int, device: torch.device) -> Run:
    """Calls a function on so many ranks: torchrun's, if this is one of them, else new ones."""
    if dist.is_initialized():
        return lambda fn, *args: [fn(*args)]
    pool = stack.enter_context(RankPool(count, "nccl" if device.type == "cuda" else "gloo"))
    return pool.run


def _links(
    found: Sequence[Mapping[str, Any]], spoken: Sequence[Sample], share: Sequence[float], most: int
) -> dict[str, Any]:
    """What exchanges say of links. Between nodes nothing was measured: the same is assumed, and marked."""
    rows = [row for table in found for row in table["rows"]] or [[1.0, 1e-6, 1e-6, 1e-6]]
    rate = max(row[0] / row[1] for row in rows)
    latency = min(row[1] for row in rows), max(row[3] for row in rows if row[0] == rows[0][0])
    other = "not measured: as inside this machine"
    return {
        "gpus_per_node": _value(
            float(max(most, torch.accelerator.device_count() if torch.cuda.is_available() else most))
        ),
        "link": _value(rate),
        "link_efficiency": _span(0.5, 1.0, "the table of exchanges is read instead"),
        "nic": _value(rate) | {"source": other, "verified": False},
        "nics_per_node": _value(1.0) | {"source": other, "verified": False},
        "nic_efficiency": _span(0.5, 1.0, other) | {"verified": False},
        "latency_inside": _span(*latency),
        "latency_across": _span(*latency, other) | {"verified": False},
        "latency_peer": _span(0.0, 0.0, "in the table of exchanges"),
        "agreement": _span(min((s.lo for s in spoken), default=0.0), max((s.hi for s in spoken), default=0.0)),
        "overlap": _span(min(share, default=0.0), max(share, default=1.0)),
    }


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({torch.backends.cpu.get_cpu_capability()})"
    )
