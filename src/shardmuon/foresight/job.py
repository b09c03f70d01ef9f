"""Plan a job without starting its ranks: lay out a model on a mesh, make its plans, and count the work of each rank.

[Note: units]
    A unit is a set of parameters that are planned together: the parameters of one pipeline stage or, under ZeRO, those
    of one optimizer group in a stage. Their layouts are computed by the same functions in layout/ as in a real job, so
    the plan has the same digests (hashes) as the plan of the real job.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardmuon.comm.groups import Ranks
from shardmuon.errors import ranks_text
from shardmuon.foresight.counting import BucketCount
from shardmuon.foresight.models import load_model
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.mesh import OnMesh, Shard
from shardmuon.layout.pieces import Box, ParamLayout
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.keeper import check_blocks
from shardmuon.momentum.stores import scale_shape
from shardmuon.muon import Muon
from shardmuon.options import MuonConfig, OptionsReader, Settings
from shardmuon.plan.plan import Plan, Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.price.machines import MACHINES, Machine
from shardmuon.step.binding import make_spec
from shardmuon.step.update import PORTION_ELSEWHERE
from shardmuon.variants import Stage

_AXES = ("dp", "shard", "tp", "ep", "pp")
_MOST_RANKS = 10_240
# one range [start, stop) per rank: the elements of a flattened parameter that the rank stores
_Ranges = tuple[tuple[int, int], ...]


# ----------------------------------------------------------------------------------------------------------- the mesh


@dataclass(frozen=True)
class _Mesh:
    """Numbers of ranks along the axes of a job's mesh. Ranks are numbered in the order (pp, dp, shard, tp), with the
    last axis varying fastest.

    Attributes:
        dp: Number of replicas (DDP's ranks, or HSDP's outer axis). With the engine "zero", the number of ranks over
            which flat buffers are sharded.
        shard: Number of ranks over which parameters are sharded (FSDP).
        tp: Number of tensor-parallel ranks.
        ep: Number of expert-parallel ranks. They are taken from the shard x tp ranks, so `ep` does not increase
            `world`.
        pp: Number of pipeline stages.
        gpus_per_node: Number of ranks on one node.
        engine: Framework that distributes the training: "torch" (DDP, FSDP2, HSDP, TP, EP) or "zero" (DeepSpeed's ZeRO
            1 and 2).
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    engine: str = "torch"

    @property
    def world(self) -> int:
        """Number of ranks in the job."""
        return self.dp * self.shard * self.tp * self.pp

    def __str__(self) -> str:
        """Format the mesh in the notation of `_parse_mesh`, such as "dp=8 shard=64"."""
        sizes = ((name, getattr(self, name)) for name in _AXES)
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


def _parse_mesh(text: str, engine: str = "torch", gpus_per_node: int = 8) -> _Mesh:
    """Parse a mesh from text such as "dp=8 shard=64 tp=8".

    Args:
        text: ``axis=size`` pairs separated by spaces or commas. Axes that are left out have size 1.
        engine: "torch" or "zero" (see `_Mesh`).
        gpus_per_node: Number of ranks on a node.

    Raises:
        ValueError: The text does not describe a mesh, or the engine does not support the mesh. The message says how to
            fix the problem.

    Examples:
        >>> _parse_mesh("dp=2 shard=64 tp=8").world
        1024
    """
    words = text.replace(",", " ").split()
    axis = rf"({'|'.join(_AXES)})=[1-9][0-9]*"
    wrong = next((word for word in words if not re.fullmatch(axis, word)), None if words else "")
    if wrong is not None:
        raise ValueError(
            f"mesh {text!r}: {wrong!r} is no axis=size. Axes are {', '.join(_AXES)}, sizes whole numbers of at least "
            '1: write for example "dp=2 shard=64 tp=8", or "dp=1" for one rank'
        )
    sizes: dict[str, Any] = {axis: int(size) for axis, size in (word.split("=") for word in words)}
    mesh = _Mesh(**sizes, engine=engine, gpus_per_node=gpus_per_node)
    lent = mesh.shard * mesh.tp
    faults = (
        (len(sizes) < len(words), f"mesh {text!r}: an axis stands there twice. Write it once"),
        (
            mesh.engine not in ("torch", "zero"),
            f'engine={engine!r} must be "torch" or "zero" (ZeRO 1 and 2). For DDP write dp=N alone; for ZeRO 3, FSDP1 '
            "and Megatron shard=N with tp and ep, whose seconds are near (how near, and what Megatron keeps: "
            "docs/foresight.md); the plan of a live optimizer has a price of its own",
        ),
        (mesh.gpus_per_node < 1, f"gpus_per_node={mesh.gpus_per_node} must be at least 1"),
        (
            mesh.world > _MOST_RANKS,
            f"mesh {mesh} has {mesh.world:,} ranks, {_MOST_RANKS:,} are the most that are planned for",
        ),
        (
            mesh.engine == "zero" and (lent > 1 or mesh.ep > 1),
            f"mesh {mesh}: engine zero shares its state out over dp and has no other axis but pp. Write "
            f"dp={mesh.dp * lent} alone, or no engine",
        ),
        (
            bool(lent % mesh.ep),
            f"mesh {mesh}: ep={mesh.ep} does not divide shard x tp = {lent}, from which expert-parallel ranks are "
            f"taken. Write an ep that does, for example ep={math.gcd(lent, mesh.ep)}",
        ),
    )
    for is_wrong, message in faults:
        if is_wrong:
            raise ValueError(message)
    return mesh


# -------------------------------------------------------------------------------------------------------- parameters

# Module names in Hugging Face's models, torchtitan, GPT-2 and Megatron. Tensor parallelism shards the weights of
# modules that match `_COLUMN` along their outputs, and those of modules that match `_ROW` along their inputs.
_COLUMN = re.compile(
    r"q_proj|k_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|wq|wk|wv|wq_b|wkv_b|w1|w3|c_attn"
    r"|c_fc|fc1|linear_qkv|linear_q|linear_fc1|query_key_value|embed_tokens|lm_head|tok_embeddings|word_embeddings"
    r"|output|output_layer|wte|embedding"
)
_ROW = re.compile(r"o_proj|down_proj|wo|w2|c_proj|fc2|out_proj|linear_proj|linear_fc2|dense_4h_to_h")
_AFTER = 1 << 30  # value of `_Param.layer` for parameters after all layers, such as an output projection


@dataclass(frozen=True)
class _Param:
    """One trainable parameter.

    Attributes:
        name: Name of the parameter, without the prefixes that wrappers add.
        shape: Global shape.
        group: Index of the parameter's optimizer group.
        use_muon: True if Muon updates the parameter, False if AdamW updates it.
        view: Description of how Muon reads the parameter as matrices. It contains no matrices if AdamW updates the
            parameter.
        cut: Dim along which tensor parallelism shards the parameter, as a negative index; None if the parameter is
            replicated.
        expert: True if the first dim indexes experts.
        layer: Index of the layer that contains the parameter; -1 if the parameter comes before all layers, `_AFTER` if
            it comes after all layers.
    """

    name: str
    shape: Ints
    group: int
    use_muon: bool
    view: MatrixView
    cut: int | None
    expert: bool
    layer: int

    @property
    def numel(self) -> int:
        """Number of elements in the unsharded parameter."""
        return math.prod(self.shape)


def _parameters_of(
    groups: Sequence[Mapping[str, Any]], settings: Sequence[Settings | None], module: nn.Module
) -> list[_Param]:
    """List all trainable parameters, in the order of the optimizer's groups.

    Args:
        groups: Parameter groups of the optimizer, with `param_names`.
        settings: Muon options of each group; None for a group that AdamW updates.
        module: The model.
    """
    layers, found = _layers(module), list[_Param]()

    @cache
    def view_of(index: int, shape: Ints) -> MatrixView:
        of_group = settings[index]
        return MatrixView(shape, shape, -1, (), 1) if of_group is None else matrix_view(shape, **of_group.view)

    for index, group in enumerate(groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            shape, muon = tuple(param.shape), bool(group["use_muon"])
            cut = _cut(name, len(shape), muon and bool(group.get("transposed", False)))
            expert = ".experts." in f".{name}." and len(shape) > 1
            view = view_of(index, shape)
            found.append(_Param(name, shape, index, muon, view, cut, expert, layers.get(id(param), _AFTER)))
    return found


def _cut(name: str, num_dims: int, transposed: bool) -> int | None:
    """Infer from a parameter's name the dim along which tensor parallelism shards the parameter.

    Args:
        name: Name of the parameter.
        num_dims: Number of dims of the parameter.
        transposed: True for a weight that is stored as (inputs, outputs).

    Returns:
        The dim as a negative index; None if tensor parallelism replicates the parameter.
    """
    words = name.split(".")
    word = words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]
    outputs, inputs = (-1, -2) if transposed else (-2, -1)
    if _COLUMN.fullmatch(word) and (num_dims > 1 or words[-1] == "bias"):
        return outputs if num_dims > 1 else -1
    return inputs if num_dims > 1 and _ROW.fullmatch(word) else None


def _layers(module: nn.Module) -> dict[int, int]:
    """Map the id of each parameter to the index of its layer: -1 before all layers, `_AFTER` after all layers.

    A model can contain several numbered lists of modules, such as encoder layers and decoder layers. The longest
    list is taken as the model's layers.
    """
    named = list(module.named_parameters())
    numbered = [found for name, _ in named if (found := re.match(r"(.+?)\.(\d+)\.", name))]
    body = max(numbered, key=lambda found: int(found[2]), default=None)
    inside = {found.string: int(found[2]) for found in numbered if body is not None and found[1] == body[1]}
    first = next((at for at, (name, _) in enumerate(named) if name in inside), 0)
    return {id(p): inside.get(name, -1 if at < first else _AFTER) for at, (name, p) in enumerate(named)}


# ------------------------------------------------------------------------------------------------------------- units


# (parameter, layout, mesh with the parameter's placements); the mesh is None for parameters in flat buffers
_Placed = tuple[_Param, ParamLayout, OnMesh | None]


class _Unit(NamedTuple):
    """Set of parameters that are planned together (see [Note: units]).

    Attributes:
        ranks: Ranks that store the parameters.
        placed: The parameters, with their layouts.
        stepped: With ZeRO, the number of elements that each rank updates, including padding. Every rank stores the
            weights of the whole flat buffer but updates only its own part. Without ZeRO, the number is 0, because each
            rank updates exactly the shards that it stores.
        stage: Index of the pipeline stage. Pipeline stages with equal parameters share the index of the first such
            stage.
    """

    ranks: Ranks
    placed: Sequence[_Placed]
    stepped: int = 0
    stage: int = 0

    def elements(self) -> NDArray[np.int64]:
        """Count the unit's elements on each rank.

        Returns:
            An array of shape (4, ranks). Its rows are the numbers of elements that Muon updates, of elements that AdamW
            updates, of stored weights, and of scales for 8-bit momentum.
        """
        muon, adamw, stored, scales = found = np.zeros((4, len(self.ranks)), dtype=np.int64)
        held = {layout: _held(layout) for layout in {layout for _, layout, _ in self.placed}}
        for param, layout, _ in self.placed:
            numel, num_scales = held[layout]
            of_kind = muon if param.use_muon else adamw
            of_kind += numel
            stored += numel
            scales += num_scales * param.use_muon
        # A flat buffer belongs to one optimizer group, so either Muon or AdamW updates the whole buffer.
        if self.stepped:
            found[0 if self.placed[0][0].use_muon else 1] = self.stepped
            found[2] = self.stepped * len(self.ranks)
        return found


def _held(layout: ParamLayout) -> NDArray[np.int64]:
    """Count the elements of a parameter that each rank holds, and the scales that 8-bit momentum needs for these
    elements. Return an array of shape (2, ranks), whose columns are in the order of `layout.ranks`."""
    rows, known = layout.view.num_row_dims, dict[object, tuple[int, int]]()
    for of_rank in set(layout.held):
        pieces = [held.piece for held in of_rank]
        boxes = (piece for piece in pieces if isinstance(piece, Box) and piece.numel)
        scales = sum(math.prod(scale_shape(box.size, rows)) for box in boxes)
        known[of_rank] = sum(piece.numel for piece in pieces), scales
    return np.array([known[of_rank] for of_rank in layout.held], dtype=np.int64).T


def _make_units(params: Sequence[_Param], mesh: _Mesh) -> list[_Unit]:
    """Divide the parameters of a job into units, which are planned separately (see [Note: units]).

    Args:
        params: Trainable parameters, in the order of the optimizer's groups.
        mesh: Arrangement of the job's ranks.

    Raises:
        ValueError: The mesh does not fit the parameters. The message says how to fix the problem.
    """
    build = _flat_buffers if mesh.engine == "zero" else _on_meshes
    size, alike, found = mesh.world // mesh.pp, dict[object, int](), list[_Unit]()
    for stage, members in enumerate(_stages_of(params, mesh)):
        first = alike.setdefault(tuple((p.view, p.group, p.cut, p.expert) for p in members), stage)
        ranks = tuple(range(stage * size, (stage + 1) * size))
        found += [unit._replace(stage=first) for unit in build(members, mesh, ranks)]
    return found


def _stages_of(params: Sequence[_Param], mesh: _Mesh) -> list[list[_Param]]:
    """Assign each parameter to a pipeline stage.

    Layers are divided evenly. If there is a remainder, the first stages get one additional layer each. Parameters
    before the layers belong to the first stage, and parameters after the layers to the last stage.
    """
    if mesh.pp == 1:
        return [list(params)]
    num_layers = 1 + max((p.layer for p in params if p.layer < _AFTER), default=-1)
    if num_layers < mesh.pp:
        raise ValueError(
            f"mesh {mesh}: pp={mesh.pp} stages for {num_layers} layers. Write pp={max(1, num_layers)} or less"
        )
    least, more = divmod(num_layers, mesh.pp)
    stage_of = [stage for stage in range(mesh.pp) for _ in range(least + (stage < more))]
    found: list[list[_Param]] = [[] for _ in range(mesh.pp)]
    for p in params:
        found[0 if p.layer < 0 else mesh.pp - 1 if p.layer == _AFTER else stage_of[p.layer]].append(p)
    return found


# ---------------------------------------------------------------------------------------- DDP, FSDP2, HSDP, TP, EP


def _on_meshes(params: Sequence[_Param], mesh: _Mesh, ranks: Ranks) -> list[_Unit]:
    found = list[_Placed]()

    @cache
    def layout_of(view: MatrixView, place: OnMesh) -> ParamLayout:
        return ParamLayout(view, ranks, tuple(held for held, _ in place.reading(view.shape).values()))

    for p in params:
        if p.expert and p.shape[0] % mesh.ep:
            raise ValueError(
                f"mesh {mesh}: ep={mesh.ep} does not divide the {p.shape[0]} experts of {p.name}. Write "
                f"ep={math.gcd(p.shape[0], mesh.ep)}"
            )
        place = _place(p, mesh, ranks)
        found.append((p, layout_of(p.view, place), place))
    return [_Unit(ranks, found)]


def _place(param: _Param, mesh: _Mesh, ranks: Ranks) -> OnMesh:
    """Return the placements that a parameter has after `parallelize_module` followed by `fully_shard`. Experts are
    placed as in torchtitan. DDP's plain tensors are treated as replicated DTensors.

    With ep > 1, experts are placed on a mesh of shape (dp, shard x tp / ep, ep). The last axis shards dim 0, which
    indexes experts. The middle axis (FSDP) shards dim 1 if there are fewer experts than shard x tp ranks, otherwise
    also dim 0.
    """
    axes: list[tuple[int, Shard | None]] = [(mesh.dp, None)]
    if param.expert and mesh.ep > 1:
        share, num = mesh.shard * mesh.tp // mesh.ep, param.shape[0]
        axes.append((share, Shard(1) if share * mesh.ep > num else Shard(0, mesh.ep)))
        axes.append((mesh.ep, Shard(0)))
    else:
        dim = None if param.cut is None or mesh.tp == 1 else len(param.shape) + param.cut
        axes.append((mesh.shard, Shard(0, mesh.tp) if dim == 0 else Shard(0)))
        axes.append((mesh.tp, None if dim is None else Shard(dim)))
    axes = [(size, placement) for size, placement in axes if size > 1] or [(1, None)]
    return OnMesh(tuple(size for size, _ in axes), ranks, tuple(placement for _, placement in axes))


# -------------------------------------------------------------------------------------------- flat buffers (ZeRO 1, 2)


def _flat_buffers(params: Sequence[_Param], mesh: _Mesh, ranks: Ranks) -> list[_Unit]:
    """Make one unit (set of parameters that are planned together) per optimizer group, because ZeRO puts the parameters
    of a group into one flat buffer.

    The buffer is padded at the end to a multiple of 2 x ranks elements and divided into equal parts, one per rank (see
    `nccl_start_alignment_factor` in stage_1_and_2.py of DeepSpeed 0.19).
    """
    num, found = len(ranks), list[_Unit]()

    @cache
    def layout_of(view: MatrixView, held: _Ranges) -> ParamLayout:
        shards = ((FlatShard(view.shape, start, None, "flat buffers"), stop - start) for start, stop in held)
        return ParamLayout(view, ranks, tuple(shard.held(numel) for shard, numel in shards))

    for _, of_group in itertools.groupby(params, key=lambda p: p.group):
        members = list(of_group)
        *starts, total = itertools.accumulate((p.numel for p in members), initial=0)
        part = 2 * -(-total // (2 * num))
        parts = [_in_parts(start, p.numel, part, num) for start, p in zip(starts, members, strict=True)]
        placed = [(p, layout_of(p.view, held), None) for p, held in zip(members, parts, strict=True)]
        found.append(_Unit(ranks, placed, part))
    return found


def _in_parts(at: int, size: int, part: int, num_ranks: int) -> _Ranges:
    """Find each rank's elements of a parameter in a flat buffer that is divided among the ranks.

    Args:
        at: Index, in the flat buffer, of the parameter's first element.
        size: Number of elements in the parameter.
        part: Number of consecutive elements of the flat buffer that each rank stores.
        num_ranks: Number of ranks.

    Returns:
        For each rank, the range [start, stop) of the flattened parameter that the rank stores; (0, 0) if it stores no
        element.
    """
    cuts = [min(max(rank * part - at, 0), size) for rank in range(num_ranks + 1)]
    return tuple((start, stop) if start < stop else (0, 0) for start, stop in itertools.pairwise(cuts))


# ------------------------------------------------------------------------------------------------------------- the job


class _Stored(NamedTuple):
    """Bytes that one rank stores between steps. They include the padding of flat buffers but not the memory allocator's
    rounding.

    Attributes:
        weights: Bytes of the parameters.
        gradients: Bytes of the gradients when `step()` is called.
        momentum: Bytes of Muon's momentum, including the scales of 8-bit momentum.
        moments: Bytes of AdamW's two moments.
        masters: Bytes of the fp32 copies of the weights that ZeRO keeps.
    """

    weights: int = 0
    gradients: int = 0
    momentum: int = 0
    moments: int = 0
    masters: int = 0

    @property
    def total(self) -> int:
        """Total bytes that the rank stores between steps."""
        return sum(self)


@dataclass(frozen=True)
class _RankClass:
    """Set of ranks that store the same number of bytes and do the same amount of work. All counts are per rank.

    Attributes:
        ranks: The ranks, ascending.
        stage: Index of the ranks' pipeline stage.
        stored: Bytes stored between steps.
        buckets: Work in each bucket (group of matrices), in the order in which the buckets are processed.
        muon_elements: Number of elements that Muon updates on each rank. A replicated element counts on each of its
            ranks.
        adamw_elements: Number of elements that AdamW updates on each rank.
        votes: Number of votes before a step. In a vote, ranks that exchange data with each other agree to take the
            step.
    """

    ranks: tuple[int, ...]
    stage: int
    stored: _Stored
    buckets: tuple[BucketCount, ...]
    muon_elements: int
    adamw_elements: int
    votes: int

    @property
    def count(self) -> int:
        """Number of ranks in this class (a set of ranks that do equal work)."""
        return len(self.ranks)

    @property
    def flops(self) -> int:
        """Number of floating point operations that each rank in the class (a set of ranks that do equal work) spends on
        orthogonalization in one step."""
        return sum(m.num * m.flops for bucket in self.buckets for m in bucket.matrices)

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that each rank in the class (a set of ranks that do equal work) sends in a step, as (bytes to ranks on
        the same node, bytes to other nodes). The sum of the two equals the step's `Traffic.bytes_sent`."""
        sides = [side for bucket in self.buckets for side in bucket.sent]
        return sum(side.inside for side in sides), sum(side.across for side in sides)

    @property
    def peak(self) -> int:
        """Upper bound on the bytes that each rank in the class (a set of ranks that do equal work) needs during a step,
        in addition to the bytes `stored` between steps.

        The bound covers the batches and exchange buffers of two buckets (groups of matrices), a workspace four times as
        large as the batches of one bucket, and 8 bytes for each element whose momentum is updated by the same foreach
        call (see docs/memory.md).
        """
        moved = (b.batches + sum(side.bytes for side in (*b.sent, *b.received)) for b in self.buckets)
        work = max((b.batches for b in self.buckets), default=0)
        portion = max((min(b.held, max(b.largest, PORTION_ELSEWHERE)) for b in self.buckets), default=0)
        return 2 * max(moved, default=0) + 4 * work + 8 * portion

    @property
    def exchanges(self) -> int:
        """Number of all-to-all calls that each rank in the class (a set of ranks that do equal work) makes in a
        step."""
        return sum(bucket.exchanges for bucket in self.buckets)

    @property
    def orthogonalized(self) -> int:
        """Number of matrices that each rank in the class (a set of ranks that do equal work) orthogonalizes in a step.
        It equals `Traffic.orthogonalized`."""
        return sum(m.num for bucket in self.buckets for m in bucket.matrices)


@dataclass(frozen=True)
class Exact:
    """Exact counts of what each rank stores, sends and computes, for one model on one mesh.

    Attributes:
        model: Name of the model, for reports.
        source: Where the model's shapes come from: a URL, a file or a function.
        muon_params: Number of parameter elements that Muon updates. Tied parameters count once.
        adamw_params: Number of parameter elements that AdamW updates. Tied parameters count once.
        mesh: Arrangement of the job's ranks.
        classes: Classes of ranks that store the same number of bytes and do the same amount of work, sorted by the
            lowest rank in each class.
        digests: Hex digests of the plans, one for each group of ranks that exchange data. Each key gives the index of
            the plan and the ranks, as in "0: 0-7". The digests equal `Plan.digests` in the real job.
        options: Other inputs of the plan as strings, by name: device, dtype of the weights, and those options of the
            optimizer that differ from their defaults.
        tokens_flops: FLOPs per token in the forward and backward pass (6 x active parameters); 0 if unknown.
    """

    model: str
    source: str
    muon_params: int
    adamw_params: int
    mesh: _Mesh
    classes: tuple[_RankClass, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    tokens_flops: int = 0

    @classmethod
    def of_job(
        cls,
        model: str | nn.Module,
        mesh: str,
        *,
        engine: str = "torch",
        gpus_per_node: int = 8,
        device: str = "cuda",
        weights: torch.dtype = torch.float32,
        machine: Machine | None = None,
        active_params: float | None = None,
        **options: Any,
    ) -> Exact:
        """Plan a job without starting its ranks, and count what each rank stores, sends and computes.

        The code that assigns, lays out and plans the parameters is the same as in a real job. So `Exact.digests` equal
        the digests of a real job with the same options.

        Args:
            model: Name of a preset, path to a config.json, MODULE:FUNCTION, or a module (see `models.load_model`).
            mesh: Sizes of the mesh axes, such as "dp=8 shard=64 tp=8".
            engine: Framework that distributes the training: "torch" or "zero" (see `_Mesh`).
            gpus_per_node: Number of ranks on a node.
            device: Type of torch device: "cuda" or "cpu".
            weights: dtype of the model's parameters. Except under ZeRO, their gradients have the same dtype.
            machine: Machine whose speed determines how matrices are divided into buckets. Default: an H100, or a CPU if
                `device` is "cpu".
            active_params: Number of parameter elements used per token. Default: the number in the preset, if it has
                one; otherwise the number of all elements except embeddings, or 0 (unknown) if the model has experts.
            **options: Options of `Muon`, such as ``method``, ``ns_steps`` or ``overrides``.

        Raises:
            ValueError: The model's shapes cannot be determined, or the mesh does not fit the model. The message says
                how to fix the problem.
        """
        if active_params is not None and (isinstance(active_params, (bool, str)) or not 1 <= active_params < math.inf):
            raise ValueError(
                f"active_params={active_params!r} must be a number of parameters of at least 1, such as 3e9"
            )
        name, source, module, active = load_model(model)
        arranged = _parse_mesh(mesh, engine, gpus_per_node)
        job = _Planned(module, arranged, device, weights, options)
        policy = Policy(job.config.bucket_bytes, machine or MACHINES["cpu-gloo" if device == "cpu" else "h100"])
        units = _make_units(job.params, arranged)
        plans = [make_plan([job.spec_of(one) for one in unit.placed if one[0].use_muon], policy) for unit in units]
        shares: dict[int, list[_RankClass]] = {}
        for unit, plan in zip(units, plans, strict=True):
            for rank, share in zip(unit.ranks, job.shares(unit, plan), strict=True):
                shares.setdefault(rank, []).append(share)
        muon, adamw = (sum(p.numel for p in job.params if p.use_muon == kind) for kind in (True, False))
        return cls(
            name,
            source,
            muon,
            adamw,
            arranged,
            _classes_of(shares),
            {
                f"{number}: {ranks_text(ranks)}": plan.digests[ranks].hex()
                for number, plan in enumerate(plans)
                for ranks in sorted(plan.digests, key=lambda ranks: (len(ranks), ranks))
                if len(ranks) > 1
            },
            {
                "device": device,
                "weights": str(weights).removeprefix("torch."),
                **{key: str(value) for key, value in job.config.changed().items()},
            },
            6 * round(active_params or active),
        )

    @classmethod
    def of_plan(cls, plan: Plan, gpus_per_node: int = 8, world: int | None = None) -> Exact:
        """Count the work in an existing plan. The counts of elements that AdamW updates and of bytes stored between
        steps are 0, because a plan does not contain this information.

        Args:
            plan: Plan of an existing optimizer, or a plan constructed by hand.
            gpus_per_node: Number of ranks on a node. A rank's node is rank // gpus_per_node.
            world: Number of ranks in the job. Default: the highest rank in the plan, plus 1.
        """
        voting = _voting(plan)
        shares = {
            rank: [_RankClass((), 0, _Stored(), found, sum(b.held for b in found), 0, int(rank in voting))]
            for rank, found in BucketCount.of_plan(plan, lambda rank: rank // gpus_per_node).items()
        }
        mesh = _Mesh(dp=max(1, max(shares, default=-1) + 1 if world is None else world), gpus_per_node=gpus_per_node)
        elements = sum(item.numel for item in plan.items)
        return cls("the plan given", "a live plan", elements, 0, mesh, _classes_of(shares))

    @property
    def world(self) -> int:
        """Number of ranks in the job."""
        return self.mesh.world

    @property
    def largest(self) -> _RankClass:
        """The class (set of ranks that do equal work) whose ranks need the most memory during a step."""
        return max(self.classes, key=lambda c: c.stored.total + c.peak)


class _Planned:
    """A job to be planned: a model on a mesh, with the options of its optimizer.

    Attributes:
        config: The optimizer's options.
        params: The model's trainable parameters.
    """

    def __init__(
        self, module: nn.Module, mesh: _Mesh, device: str, weights: torch.dtype, options: Mapping[str, Any]
    ) -> None:
        self._mesh, self._device, self._weights = mesh, device, weights
        self.config = MuonConfig(**{one.name: options[one.name] for one in fields(MuonConfig) if one.name in options})
        if mesh.engine == "zero" and self.config.stored():
            raise ValueError(
                f"engine zero keeps fp32 momentum and weights itself, and refuses {self.config.stored()}. Leave that "
                "out (--momentum of the command)"
            )
        with warnings.catch_warnings():  # Suppress `Muon`'s warnings, because the real job issues them anyway.
            warnings.simplefilter("ignore")
            groups = Muon(module, **{"lr": 0.02, **options}).param_groups
        self._options = OptionsReader().read(groups)
        self.params = _parameters_of(groups, self._options, module)
        # maps (index of the optimizer group, layout) to a `Spec`, the plan's description of a parameter
        self._specs: dict[tuple[int, ParamLayout], Spec] = {}

    def spec_of(self, placed: _Placed) -> Spec:
        param, layout, place = placed
        key, settings = (param.group, layout), self._options[param.group]
        if key not in self._specs:
            assert settings is not None, "a group of matrices"
            if self.config.momentum_dtype == "int8":
                check_blocks(param.name, layout)

            def kept_of(stage: Stage) -> ParamLayout:
                numbers = [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices]
                if place is None:
                    return ParamLayout.replicated(layout.view.kept(numbers), layout.ranks)
                return place.kept(layout, numbers)

            device = torch.device(self._device)
            doubles = self._weights == torch.float64
            self._specs[key] = make_spec(param.name, layout, settings, self.config, device, None, doubles, kept_of)
        return self._specs[key]._replace(name=param.name)

    def shares(self, unit: _Unit, plan: Plan) -> Iterable[_RankClass]:
        buckets = BucketCount.of_plan(plan, lambda rank: rank // self._mesh.gpus_per_node)
        voting = _voting(plan)
        for rank, (muon, adamw, weights, scales) in zip(unit.ranks, unit.elements().T.tolist(), strict=True):
            stored = self._stored(muon, adamw, weights, scales)
            yield _RankClass((), unit.stage, stored, buckets.get(rank, ()), muon, adamw, int(rank in voting))

    def _stored(self, muon: int, adamw: int, weights: int, scales: int) -> _Stored:
        """Compute the number of bytes that a rank stores between steps.

        Args:
            muon: Number of elements that Muon updates.
            adamw: Number of elements that AdamW updates.
            weights: Number of weight elements that the rank stores.
            scales: Number of scales that 8-bit momentum needs.
        """
        size, momentum = self._weights.itemsize, self.config.momentum_dtype
        if self._mesh.engine == "zero":
            stepped = 4 * (muon + adamw)
            return _Stored(size * weights, stepped, 4 * muon, 8 * adamw, stepped)
        of_momentum = 4 * scales + muon if momentum == "int8" else muon * (momentum or self._weights).itemsize
        return _Stored(size * weights, size * weights, of_momentum, 2 * size * adamw)


def _voting(plan: Plan) -> set[int]:
    return {rank for ranks in plan.digests if len(ranks) > 1 for rank in ranks}


def _classes_of(shares: Mapping[int, Sequence[_RankClass]]) -> tuple[_RankClass, ...]:
    """Group ranks into classes with equal counts in all units (sets of parameters that are planned together).

    Args:
        shares: Counts of each rank: one `_RankClass`, with empty `ranks`, for each of its units.
    """
    members: dict[tuple[_RankClass, ...], list[int]] = {}
    for rank in sorted(shares):
        members.setdefault(tuple(shares[rank]), []).append(rank)
    return tuple(
        _RankClass(
            ranks=tuple(ranks),
            stage=units[0].stage,
            stored=_Stored(*map(sum, zip(*(unit.stored for unit in units), strict=True))),
            buckets=tuple(bucket for unit in units for bucket in unit.buckets),
            muon_elements=sum(unit.muon_elements for unit in units),
            adamw_elements=sum(unit.adamw_elements for unit in units),
            votes=sum(unit.votes for unit in units),
        )
        for units, ranks in members.items()
    )
