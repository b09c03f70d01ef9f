"""Training jobs with DeepSpeed, compared with a dense reference in one process.

Gradients are multiples of 1/8 (or of 3/8 on three ranks), so that their mean is exact in every dtype and in any order
of summation. With gradient clipping, the dense reference uses the clipped gradient that DeepSpeed passed to the
optimizer. This gradient is read from the momentum buffer, which contains half of the gradient after a first step with
momentum=0.5.
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
# for each parameter group, the names of its parameters and its options
Groups = list[tuple[tuple[str, ...], dict[str, Any]]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_it_is(function: Any = None, **options: Any) -> Any:
    """Return the function uncompiled. This stand-in for `torch.compile` also works as a decorator, with or without
    parentheses."""
    return (lambda decorated: decorated) if function is None else function


@lru_cache
def import_deepspeed() -> None:
    """Import DeepSpeed without compiling its Muon, because loading torch's compilers takes 1.7 of the 2.4 seconds of
    the import. `gc.freeze` exempts the imported objects from the garbage collection that DeepSpeed runs in every step
    with ZeRO stage 3."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with mock.patch.object(torch, "compile", as_it_is), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        importlib.import_module("deepspeed.runtime.zero.stage3")
    gc.collect()
    gc.freeze()


def start() -> None:
    with quiet():
        pass


@contextmanager
def quiet() -> Iterator[Any]:
    """Yield the DeepSpeed module while its logging, its compiled helpers and the torch warnings that it triggers are
    disabled."""
    # With ZeRO stage 3, DeepSpeed formats every parameter for log messages that it then discards. A cheap `__repr__`
    # saves this time.
    with warnings.catch_warnings(), mock.patch.object(nn.Parameter, "__repr__", object.__repr__):
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
# A step orthogonalizes 11 matrices: the eight parameters that are a single matrix, and the three heads of the parameter
# "heads".
RUNS = 11
# The first group has six trained matrices of different shapes. The matrix "row" has a single row, "e" is a tied weight,
# and a frozen matrix comes between "e" and "f". Muon groups come before and after the AdamW group. The matrix "tiny"
# has two elements, so some ranks may store none of it.
GROUPS: Groups = [
    (("a", "b", "e", "frozen", "f", "c", "row"), {"lr": 0.02}),
    (("d",), {"lr": 0.01, "weight_decay": 0.2}),
    (("v",), {"use_muon": False, "lr": 3e-3}),
    (("heads",), {"split_sizes": 3, "lr": 0.03, "momentum": 0.9}),
    (("tiny",), {"lr": 0.05}),
]
# Universal checkpoints do not support empty flat buffers. In a group of its own, "tiny" could leave the buffers of some
# ranks empty, so it joins the group of "d".
JOINED: Groups = [GROUPS[0], (("d", "tiny"), GROUPS[1][1]), *GROUPS[2:4]]


@dataclass(frozen=True)
class Case:
    """Configuration of a DeepSpeed job.

    Attributes:
        zero: Options added to `zero_optimization` in DeepSpeed's configuration.
        config: Options added at the top level of DeepSpeed's configuration.
        groups: Parameter groups of the optimizer.
        named: Whether the parameters in the groups have names.
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
        # The tied weight is used twice. Each use contributes half of the gradient, and the sum of the halves is exact.
        if "e" in uses:
            uses["e"] = self.e / 2 + (self.tied - self.tied.detach()) / 2
        return torch.stack([(p * factors[n][: len(p)]).sum().float() for n, p in uses.items()]).sum()


def factors(shapes: Shapes, step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """Return the factors by which the loss multiplies the weights on a rank. The loss is linear in the weights, so the
    factors are also the gradients."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    unit = (3 if dist.get_world_size() == 3 else 1) / 8
    return {n: torch.randint(-8, 9, s, generator=generator) * unit for n, s in shapes.items()}


def said_by(call: Callable[[], object]) -> str:
    """Return the type and the text of the error that `call` raises, or "" if the call succeeds."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Job:
    """A model trained with DeepSpeed, and a dense copy of its parameters in this process.

    Args:
        change: Function that changes the model after the optimizer is created and before DeepSpeed is initialized.
        options: Options of `Muon`.
    """

    def __init__(self, deepspeed: Any, case: Case, change: Callable[[Any], object] | None = None, **options: Any):
        self.case = case
        # torch computes in fp16 on any CPU, although DeepSpeed reports fp16 as unsupported.
        if case.dtype == "fp16":
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        with deepspeed.zero.Init(config_dict_or_path=case.written()) if case.zero_init else nullcontext():
            self.net: Any = Net(case.shapes)
        self.dense = Net(case.shapes)
        for p in self.dense.parameters():
            p.data = p.data.to(DTYPES[case.dtype]).float()
        self.trained = [name for name, p in self.dense.named_parameters() if p.requires_grad]
        options = {"method": case.method, **options}
        # Hyperball variants do not support weight decay, so every job with a variant sets it to 0.
        if options.get("variant"):
            options["weight_decay"] = 0.0
        self.optimizer = Muon(self._groups(self.net, options, case.named), lr=1e-3, **options)
        options = {key: value for key, value in options.items() if not key.startswith("audit_")}
        self.reference = Muon(self._groups(self.dense, options, True), lr=1e-3, **options)
        if change is not None:
            first = self.net.a
            change(self.net)
            # `change` may have replaced the parameter `a`. Put the new parameter into the optimizer's group, as
            # DeepSpeed does when it replaces parameters of a client optimizer.
            for group in self.optimizer.param_groups:
                group["params"] = [self.net.a if p is first else p for p in group["params"]]
        self.engine = ZeroRun.initialize(self.net, self.optimizer, case.written())
        self.start = {n: p.detach().clone() for n, p in self.dense.named_parameters()}

    def _groups(self, net: nn.Module, options: dict[str, Any], named: bool) -> list[dict[str, Any]]:
        groups = []
        for names, of_group in self.case.groups:
            params = [(n, p) for n, p in ((n, net.get_parameter(n)) for n in names) if p.requires_grad]
            groups.append({"params": params if named else [p for _, p in params], **of_group})
            # With momentum=0.5 or betas=(0.5, ..), the momentum after the first step is half of the gradient, so the
            # job can read the clipped gradient from the momentum.
            if self.case.clip:
                groups[-1] |= {"momentum": 0.5} if of_group.get("use_muon", True) else {"betas": (0.5, 0.95)}
            if options.get("variant"):
                groups[-1]["weight_decay"] = 0.0
        return groups

    def said(self, number: int = 0) -> str:
        """Run a training step with DeepSpeed. Return the text of its error, or "" if it succeeds."""
        return said_by(lambda: self.train(number))

    def step(self, number: int) -> None:
        self.train(number)
        self.step_dense(number)

    def train(self, number: int) -> None:
        """Run a training step with DeepSpeed only, without the step of the dense reference."""
        for micro in range(self.case.accumulate):
            self.engine.backward(self.engine(factors(self.case.shapes, number, micro, dist.get_rank())))
            self.engine.step()

    def step_dense(self, number: int) -> None:
        every = itertools.product(range(self.case.accumulate), range(dist.get_world_size()))
        parts = [factors(self.case.shapes, number, micro, rank) for micro, rank in every]
        # `bound` limits the relative error of DeepSpeed's clipped gradient. It covers the rounding errors of the
        # gradient norm (the root of a sum of squares), of the clipping factor, and of the clipped gradient.
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
        """Return DeepSpeed's fp32 master weights. The result is wrong with round_robin_gradients, because the DeepSpeed
        function that reads the weights does not support this option."""
        return {n: ZeroRun.whole_weight(getattr(self.net, n)) for n in self.trained}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights and, if they are in half precision, also the fp32 master weights. Collective with
        ZeRO stage 3."""
        import deepspeed

        params = [getattr(self.net, n) for n in self.trained]
        with deepspeed.zero.GatheredParameters(params) if self.case.stage == 3 else nullcontext():
            own = {n: p.detach().clone() for n, p in zip(self.trained, params, strict=True)}
        if self.case.dtype == "fp32" or self.case.zero.get("round_robin_gradients"):
            return own
        return own | {f"{n} (master)": t for n, t in self.masters().items()}

    def check(self, names: Sequence[str] | None = None) -> None:
        """Assert that the weights are bitwise equal to the dense reference's weights."""
        now = {name: (name.removesuffix(" (master)"), value) for name, value in self.weights().items()}
        dense = {name: p.detach() for name, p in self.dense.named_parameters() if name in (names or self.trained)}
        assert [n for n, (of, w) in now.items() if of in dense and not torch.equal(w, dense[of].to(w.dtype))] == []

    @property
    def host(self) -> Any:
        return next(one for one in self.optimizer.hosts if one.packages == ("deepspeed",))


@contextmanager
def started(case: Case, **changed: Any) -> Iterator[Job]:
    with quiet() as deepspeed:
        job = Job(deepspeed, case, **changed)
        try:
            yield job
        finally:
            job.engine.destroy()


def dense_update(weight: Tensor, momentum: Tensor) -> Tensor:
    """Return the weight after one dense step with the options `HALF`. The gradient is twice the given momentum, because
    with momentum=0.5 the momentum after the first step is half of the gradient."""
    dense = nn.Parameter(weight.clone())
    dense.grad = 2 * momentum
    assert float(dense.grad.norm()) > 0
    Muon([dense], **HALF).step()
    return dense.detach()


HALF: dict[str, Any] = {"lr": 0.02, "momentum": 0.5, "method": "standard"}
