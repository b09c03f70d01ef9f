"""DeepSpeed on ranks: imported once in each, for less than it takes by itself, and jobs that are compared with the same
parameters in one process.

Gradients have closed forms (a weight times a constant, summed). Their elements are multiples of 1/8, on three ranks of
3/8, so that every mean over ranks and micro-batches is exact in fp32, fp16 and bf16, in whatever order it is summed:
what differs from the dense update then is shardmuon's doing, and nothing may, in any arithmetic. Where DeepSpeed clips,
the dense update is given what it handed over: half of it is in the momentum, exactly. Weights are compared as the model
has them, not as DeepSpeed's functions show its own copies.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tolerances import assert_near, sum_roundoff
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.testing.frameworks import ZeroRun

Shapes = dict[str, tuple[int, ...]]
Groups = list[tuple[tuple[str, ...], dict[str, Any]]]  # names of parameters, options
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_it_is(function: Any = None, **options: Any) -> Any:
    """`torch.compile`, with and without parentheses as a decorator."""
    return (lambda decorated: decorated) if function is None else function


@lru_cache
def import_deepspeed() -> None:
    """DeepSpeed's own Muon, of which little is used here, is not compiled where it is imported (that loads torch's
    compilers, in 1.7 s of 2.4), and what has been imported is left out when garbage is collected, as stage 3 does each
    time."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with mock.patch.object(torch, "compile", as_it_is), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        importlib.import_module("deepspeed.runtime.zero.stage3")
    gc.collect()
    gc.freeze()


def start() -> None:
    """Start DeepSpeed on this rank."""
    with quiet():
        pass


@contextmanager
def quiet() -> Iterator[Any]:
    """DeepSpeed as a module, without its log, compiled helpers and torch's notices about its calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = ZeroRun.start_deepspeed()
        import_deepspeed()
        warnings.simplefilter("ignore")
        yield deepspeed


# ------------------------------------------------------------------------------------------------------- a job

SHAPES: Shapes = {
    "a": (48, 40),
    "b": (37, 53),
    "e": (31, 18),
    "frozen": (10, 12),
    "f": (12, 44),
    "c": (64, 24),
    "d": (20, 60),
    "heads": (24, 16),
    "v": (37,),
    "row": (1, 33),
    "tiny": (1, 2),
}
MUON = ("a", "b", "e", "f", "c", "row", "d", "heads", "tiny")
RUNS = 11  # eight matrices and three heads
# Six unequal matrices in one group, one of them a row, a frozen one and a tied one between them; other groups before
# and after AdamW's; at last a matrix of fewer elements than there may be ranks.
GROUPS: Groups = [
    (("a", "b", "e", "frozen", "f", "c", "row"), {"lr": 0.02}),
    (("d",), {"lr": 0.01, "weight_decay": 0.2}),
    (("v",), {"use_muon": False, "lr": 3e-3}),
    (("heads",), {"split_sizes": 3, "lr": 0.03, "momentum": 0.9}),
    (("tiny",), {"lr": 0.05}),
]
# Universal checkpoints are not for flats without any element.
JOINED: Groups = [GROUPS[0], (("d", "tiny"), GROUPS[1][1]), *GROUPS[2:4]]


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        zero: Added to `zero_optimization` of DeepSpeed's configuration.
        config: Added to the configuration.
        groups: Of the optimizer; without names of parameters if not `named`.
    """

    stage: int
    method: str = "standard"
    dtype: str = "fp32"
    accumulate: int = 1
    clip: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero_init: bool = False
    shapes: Shapes = field(default_factory=lambda: SHAPES)
    groups: Groups = field(default_factory=lambda: GROUPS)
    named: bool = True

    def __str__(self) -> str:
        flags = [f"stage{self.stage}", self.method, self.dtype, f"gas{self.accumulate}", f"clip{self.clip:g}"]
        flags += [f"{key}={value}" for key, value in {**self.zero, **self.config}.items()]
        return " ".join([*flags, *["zero.Init"] * self.zero_init, *["unnamed"] * (not self.named)])

    def written(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        for key, value in self.config.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        return config


class Net(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * 0.05
            setattr(self, name, nn.Parameter(weight, requires_grad=name != "frozen"))
        if "e" in shapes:
            self.tied = self.e

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        uses = {name: getattr(self, name) for name in self.names}
        if "e" in uses:  # in two uses half of the gradient each, which is exact
            uses["e"] = self.e / 2 + (self.tied - self.tied.detach()) / 2
        return torch.stack([(p * factors[n][: len(p)]).sum().float() for n, p in uses.items()]).sum()


def factors(shapes: Shapes, step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """A rank's factors of the weights: its gradient."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    unit = (3 if dist.get_world_size() == 3 else 1) / 8
    return {n: torch.randint(-8, 9, s, generator=generator) * unit for n, s in shapes.items()}


def said_by(call: Callable[[], object]) -> str:
    """Text of what a call raises; "": nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Job:
    """A model under DeepSpeed, and the same parameters dense in this process.

    Args:
        change: What is done to the model when the optimizer has its parameters, before DeepSpeed does.
        options: Of `Muon`.
    """

    def __init__(self, deepspeed: Any, case: Case, change: Callable[[Any], object] | None = None, **options: Any):
        self.case = case
        if case.dtype == "fp16":  # torch computes it on any CPU
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        with deepspeed.zero.Init(config_dict_or_path=case.written()) if case.zero_init else nullcontext():
            self.net: Any = Net(case.shapes)
        self.dense = Net(case.shapes)
        for p in self.dense.parameters():
            p.data = p.data.to(DTYPES[case.dtype]).float()
        self.trained = [name for name, p in self.dense.named_parameters() if p.requires_grad]
        options = {"method": case.method, **options}
        if options.get("variant"):  # Hyperball knows no decay
            options["weight_decay"] = 0.0
        self.optimizer = Muon(self._groups(self.net, options, case.named), lr=1e-3, **options)
        options = {key: value for key, value in options.items() if not key.startswith("audit_")}
        self.reference = Muon(self._groups(self.dense, options, True), lr=1e-3, **options)
        if change is not None:
            first = self.net.a
            change(self.net)
            for group in self.optimizer.param_groups:  # as DeepSpeed's remapping of client optimizers does
                group["params"] = [self.net.a if p is first else p for p in group["params"]]
        self.engine = ZeroRun.initialize(self.net, self.optimizer, case.written())
        self.start = {n: p.detach().clone() for n, p in self.dense.named_parameters()}

    def _groups(self, net: nn.Module, options: dict[str, Any], named: bool) -> list[dict[str, Any]]:
        groups = []
        for names, of_group in self.case.groups:
            params = [(n, p) for n, p in ((n, net.get_parameter(n)) for n in names) if p.requires_grad]
            groups.append({"params": params if named else [p for _, p in params], **of_group})
            if self.case.clip:  # state is half of the gradient
                groups[-1] |= {"momentum": 0.5} if of_group.get("use_muon", True) else {"betas": (0.5, 0.95)}
            if options.get("variant"):
                groups[-1]["weight_decay"] = 0.0
        return groups

    def said(self, number: int = 0) -> str:
        """Text of what DeepSpeed's part of a step raises; "": nothing."""
        return said_by(lambda: self.train(number))

    def step(self, number: int) -> None:
        self.train(number)
        self.step_dense(number)

    def train(self, number: int) -> None:
        """DeepSpeed's part of a step."""
        for micro in range(self.case.accumulate):
            self.engine.backward(self.engine(factors(self.case.shapes, number, micro, dist.get_rank())))
            self.engine.step()

    def step_dense(self, number: int) -> None:
        every = itertools.product(range(self.case.accumulate), range(dist.get_world_size()))
        parts = [factors(self.case.shapes, number, micro, rank) for micro, rank in every]
        # of the norm, a root of a sum of squares, of the factor and of the product
        bound = 2 * sum_roundoff(torch.float32, sum(map(math.prod, self.case.shapes.values())))
        for name in self.trained:
            grad = torch.stack([part[name] for part in parts]).double().mean(0).float()
            if self.case.clip:
                handed_over = 2 * ZeroRun.whole_momentum(getattr(self.net, name))
                factor = self.case.clip / float(self.engine.get_global_grad_norm())
                assert_near(handed_over, factor * grad, bound, name)
                grad = handed_over
            self.dense.get_parameter(name).grad = grad
        self.reference.step()

    def masters(self) -> dict[str, Tensor]:
        """DeepSpeed's fp32 copies as its own function shows them, which it does wrongly with round_robin_gradients."""
        return {n: ZeroRun.whole_weight(getattr(self.net, n)) for n in self.trained}

    def weights(self) -> dict[str, Tensor]:
        """The model's own, and under another name the masters of half-precision ones. Collective at stage 3."""
        import deepspeed

        params = [getattr(self.net, n) for n in self.trained]
        with deepspeed.zero.GatheredParameters(params) if self.case.stage == 3 else nullcontext():
            own = {n: p.detach().clone() for n, p in zip(self.trained, params, strict=True)}
        if self.case.dtype == "fp32" or self.case.zero.get("round_robin_gradients"):
            return own
        return own | {f"{n} (master)": t for n, t in self.masters().items()}

    def check(self, names: Sequence[str] | None = None) -> None:
        """Weights have the dense ones' bits."""
        now = {name: (name.removesuffix(" (master)"), value) for name, value in self.weights().items()}
        dense = {name: p.detach() for name, p in self.dense.named_parameters() if name in (names or self.trained)}
        assert [n for n, (of, w) in now.items() if of in dense and not torch.equal(w, dense[of].to(w.dtype))] == []

    @property
    def host(self) -> Any:
        return next(one for one in self.optimizer.hosts if one.packages == ("deepspeed",))


@contextmanager
def started(case: Case, **changed: Any) -> Iterator[Job]:
    """A job, ended afterwards."""
    with quiet() as deepspeed:
        job = Job(deepspeed, case, **changed)
        try:
            yield job
        finally:
            job.engine.destroy()


def dense_update(weight: Tensor, momentum: Tensor) -> Tensor:
    """A weight after a step of one process with `HALF` on the gradient of which the momentum has half, exactly."""
    dense = nn.Parameter(weight.clone())
    dense.grad = 2 * momentum
    assert float(dense.grad.norm()) > 0
    Muon([dense], **HALF).step()
    return dense.detach()


HALF: dict[str, Any] = {"lr": 0.02, "momentum": 0.5, "method": "standard"}
