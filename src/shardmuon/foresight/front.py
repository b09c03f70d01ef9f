"""`plan`: from a model, a mesh and a GPU to a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.hardware_files import load
from shardmuon.foresight.job import Setting, count
from shardmuon.foresight.models import Loader
from shardmuon.foresight.report import Report, make_report
from shardmuon.foresight.types import Exact, Mesh


def plan(
    model: str | nn.Module,
    mesh: str | Mesh,
    *,
    gpu: str | Path | Hardware = "h100",
    engine: str | None = None,
    gpus_per_node: int | None = None,
    tokens_per_step: float | None = None,
    price_per_gpu_hour: float | None = None,
    active_params: float | None = None,
    setting: Setting | None = None,
    advice: bool = True,
    from_function: Loader | None = None,
    from_config: Loader | None = None,
    **options: Any,
) -> Report:
    """Say what Muon will take of a job on any mesh, without its ranks and without a GPU.

    Args:
        model: A preset's name, a config.json, a .safetensors file, or a module on the meta device.
        mesh: Sizes of axes, such as "dp=8 shard=64 tp=8 ep=8 pp=4".
        gpu: Name of a hardware file that comes with the package, a file, or `Hardware`.
        engine: What cuts parameters up: "fsdp2", "ddp", "fsdp1", "zero1" to "zero3", "megatron".
        gpus_per_node: Ranks that the fast links join. Default: the hardware's.
        tokens_per_step: Tokens of a training step on all ranks, to tell the optimizer's share of it.
        price_per_gpu_hour: Dollars of one GPU, to tell what steps cost.
        active_params: How many parameters work on one token, if neither the model nor its configuration says how many
            experts a token takes.
        setting: dtypes and the optimizer's options. Default: `Muon`'s, on that hardware's kind of device.
        advice: Plan and price changes that might help.
        from_function: Builds a model from MODULE:FUNCTION.
        from_config: Builds a model from a config.json.
        **options: Of `Muon`; ``orthogonalizer``, ``exchange`` and ``storage`` come before those of `setting`.

    Returns:
        A report: `print` it, `report.write_html(path)`, `report.price.step`, `report.exact`.

    Raises:
        ValueError: No such model or GPU, or a mesh that does not fit; says what to write.

    Examples:
        >>> report = plan("llama3-8b", "shard=64", gpu="h100", tokens_per_step=4e6, advice=False)
        >>> report.exact.world, report.price.step.lo < report.price.step.hi
        (64, True)
    """
    hardware = gpu if isinstance(gpu, Hardware) else load(gpu)
    of_setting = {key: options.pop(key) for key in ("orthogonalizer", "exchange", "storage") if key in options}
    setting = replace(setting or Setting(device=hardware.device), machine=hardware.machine, **of_setting)
    given: dict[str, Any] = {"from_function": from_function, "from_config": from_config, **options}
    given["active_params"] = active_params
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    exact = count(model, mesh, engine=engine, gpus_per_node=per_node, setting=setting, **given)

    def replan(changes: Mapping[str, Any]) -> Exact:
        exchange = replace(setting.exchange, **{k: v for k, v in changes.items() if k not in ("mesh", "owners")})
        changed = {**given, "setting": replace(setting, exchange=exchange), "owners": changes.get("owners", 1)}
        return count(model, changes.get("mesh", exact.mesh), **changed)

    return make_report(
        exact,
        hardware,
        tokens=tokens_per_step,
        dollars_per_hour=price_per_gpu_hour,
        replan=replan if advice else None,
    )
