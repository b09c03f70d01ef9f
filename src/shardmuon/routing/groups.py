"""Routing of parameters to Muon and AdamW. `param_groups(model)` returns parameter groups, and a table with the reason
for each choice.

Routing depends on a parameter's role in the model (roles.py), never on its name alone. A second pass over all
parameters uses their positions in the model to find output heads and experts. Users can correct each choice with
overrides. The groups, their order and the table follow from the model's structure. So all data-parallel ranks get the
same result without communication, whether the model is already sharded or not.

[Note: output heads]
    An output head is a layer that maps features to one logit per vocabulary entry or class. Nothing in torch marks
    output heads, so these rules apply in order:
    1. Weights that are tied to an embedding (roles.py) are output heads. So are layers that the model returns from
       `get_output_embeddings()` (Hugging Face) or `get_classifier()` (timm). In a module with an attribute `num_labels`
       (Hugging Face's classifiers), the last linear layer with `num_labels` rows is an output head.
    2. Let V be the number of rows of an embedding. A linear layer with V rows is an output head if nothing in the model
       reads V features, that is, no layer has V inputs, and no norm or embedding has width V. If
       `get_input_embeddings()` names embeddings, only these and embeddings tied to other layers count, because tables
       of positions or token types are not vocabularies. In a repeated block, only the last matrix can be an output head
       by this rule. Otherwise, in a byte-level model (V = 256), a key projection with 4 attention heads of 64 features
       could be taken for an output head, because it also has 256 rows.
    3. If rules 1 and 2 find no output head, the condition of rule 2 that no layer reads V features is dropped, because
       it cannot hold in, for example, a byte-level model of width 256. The output head is then the last linear layer
       with V rows outside the repeated blocks. If there is no such layer, the model is treated as a classifier: if its
       last module is a linear layer that comes after repeated blocks, this layer is the output head, whatever its
       number of rows.
    If a choice may be wrong, a warning names the override that confirms or corrects it.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from shardmuon.comm.groups import GroupRef
from shardmuon.errors import about
from shardmuon.layout.engines.tensor_parallel import check_expert
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.options import (
    ADAMW_DEFAULTS,
    ONLY_MUON,
    VIEW_DEFAULTS,
    check_hyperparameters,
    check_keys,
    given_lr,
    lr_scale,
    refuse_sets,
)
from shardmuon.routing.presets import Role, numbers_out
from shardmuon.routing.roles import Place, Placed, by, num_text
from shardmuon.texts import did_you_mean, listed, table

_Pattern = str | Callable[[str, Tensor, nn.Module], bool]
Overrides = Mapping[_Pattern, str | Mapping[str, Any]] | Sequence[tuple[_Pattern, str | Mapping[str, Any]]]


@dataclass(frozen=True)
class RoutingRow:
    """A row of the routing table. It shows to which optimizer a parameter is assigned, and why.

    Attributes:
        name: The parameter's name, without the prefixes that DDP, `torch.compile` and activation checkpointing add.
        shape: The parameter's global shape.
        matrices: (rows, cols) of each matrix that Muon orthogonalizes; empty for AdamW and frozen parameters.
        optimizer: "Muon", "AdamW" or "frozen".
        reason: Reason for the assignment.
    """

    name: str
    shape: Ints
    matrices: tuple[tuple[int, int], ...]
    optimizer: Literal["Muon", "AdamW", "frozen"]
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """List of parameter groups, which are dicts in the format of torch's optimizers. Muon's groups come first. `str()`
    returns the routing table. In the table, parameters share one line if their rows differ only in the numbers in their
    names.

    Attributes:
        rows: One `RoutingRow` for each parameter, frozen parameters included, in model order.
        matched: Ratio of AdamW's lr to Muon's lr that `param_groups` chose; None if `adamw_lr` was given.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]] = (), rows: Iterable[RoutingRow] = (), matched: float | None = None
    ) -> None:
        super().__init__(groups)
        self.rows = tuple(rows)
        self.matched = matched

    def __str__(self) -> str:
        alike: dict[RoutingRow, list[str]] = {}
        for row in self.rows:
            alike.setdefault(replace(row, name=numbers_out(row.name)), []).append(row.name)
        cells = [("name", "shape", "matrices", "optimizer", "reason")]
        for row, names in alike.items():
            counts = Counter(row.matrices).items()
            sizes = ", ".join(f"{count} of {by(size)}" for size, count in counts) or "-"
            name = names[0] if len(names) == 1 else f"{row.name} ({len(names)})"
            cells.append((name, by(row.shape), sizes, row.optimizer, row.reason))
        lines = [f"{table(cells)}\n"]
        for optimizer in ("Muon", "AdamW", "frozen"):
            rows = [row for row in self.rows if row.optimizer == optimizer]
            matrices = f"{num_text(sum(len(row.matrices) for row in rows), 'matrix')}, " if optimizer == "Muon" else ""
            elements = num_text(sum(math.prod(row.shape) for row in rows), "element")
            if rows or optimizer != "frozen":
                lines.append(f"{optimizer}: {num_text(len(rows), 'parameter')}, {matrices}{elements}")
        if self.matched is not None and any(row.optimizer == "AdamW" for row in self.rows):
            lines.append(
                f"AdamW's lr is {self.matched:.3g} times Muon's, to make its updates as large (no adamw_lr was given)"
            )
        return "\n".join(lines)

    @staticmethod
    def routed(params: Any, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """Make parameter groups with `shardmuon.param_groups` if `params` is a module. Otherwise, return `params`
        unchanged.

        Args:
            params: The optimizer's first argument: a module, parameters or groups.
            defaults: The optimizer's options.
            given: Options that only `param_groups` takes, such as `overrides`. A value of None counts as not given.

        Raises:
            TypeError: Options for `param_groups` are given, but `params` is not a module, so the options would have no
                effect.
            ValueError: `params` was made by `param_groups`, which chose an lr for AdamW that matches Muon's default
                learning-rate scale, but the optimizer's `adjust_lr_fn` selects a different scale.
        """
        given = {key: value for key, value in given.items() if value is not None}
        if isinstance(params, nn.Module):
            own = {key: defaults[key] for key in ("lr", "weight_decay", "tp_group", "adjust_lr_fn")}
            groups, lr = param_groups(params, **own, **given), own["lr"]
            # An lr below 2e-3 is typical of AdamW. With Muon's default learning-rate scale, matrices would train far
            # too slowly at such an lr.
            if own["adjust_lr_fn"] is None and groups[0]["use_muon"] and not isinstance(lr, Tensor) and 0 < lr < 2e-3:
                warnings.warn(
                    f"Muon: lr={lr:g} is of AdamW's size; with the default scale it moves matrices very little. "
                    'To keep AdamW\'s lr write adjust_lr_fn="match_rms_adamw"; to train from scratch write lr=0.03; if '
                    'it is meant, write adjust_lr_fn="original"',
                    stacklevel=3,
                )
            return groups
        for key in given:
            raise TypeError(
                f"{key} is for a module, which Muon routes by itself; found {type(params).__name__}. Write "
                f"Muon(model, {key}=...), or give the groups of shardmuon.param_groups(model, {key}=...)"
            )
        if getattr(params, "matched", None) not in (None, 1.0):
            scale, missing = defaults["adjust_lr_fn"], any(g["use_muon"] and "adjust_lr_fn" not in g for g in params)
            if scale not in (None, "original") and missing:
                raise ValueError(
                    f"adjust_lr_fn={scale!r} was given to Muon, but param_groups matched AdamW's lr to the default "
                    "scale of the matrices' updates. Give adjust_lr_fn to param_groups, or give it adamw_lr"
                )
        return params


def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor | None = None,
    adamw_lr: float | Tensor | None = None,
    weight_decay: float = 0.1,
    adjust_lr_fn: str | None = None,
    overrides: Overrides | None = None,
    tp_group: Any = None,
) -> ParamGroups:
    """Assign a model's parameters to Muon and AdamW groups by their role in the model.

    Every trainable parameter is in exactly one group, according to the rules in docs/routing.md. Parameters with equal
    options share a group. Muon's groups come first. Apart from this, groups and their parameters are in model order. No
    group is empty. If a choice may be wrong, a warning names the override that confirms or corrects it.

    The function can be called before or after `fully_shard`, `parallelize_module`, DDP, FSDP1 (with
    ``use_orig_params=True``) or `torch.compile`.

    Args:
        model: The model. Its parameters alone are not enough, because their roles follow from the modules.
        lr: Learning rate of Muon's groups. Required.
        adamw_lr: Learning rate of AdamW's groups. By default, the value at which AdamW's updates are as large as Muon's
            (see docs/learning_rate.md). The routing table shows the default as a multiple of `lr`.
        weight_decay: Weight decay of matrices, embeddings and output heads. Other parameters have no weight decay. To
            change this, edit the returned groups.
        adjust_lr_fn: Learning-rate scale of Muon's groups (see `shardmuon.Muon`). If None, the groups use the
            optimizer's own setting.
        overrides: Pairs (pattern, choice), as a list or a dict. The first pair whose pattern matches a parameter
            applies. A pattern is a glob for parameter names, or a predicate (name, parameter, module) -> bool. A choice
            is "muon", "adamw" or a dict of group options, such as ``{"use_muon": True, "split_sizes": 8, "lr": 3e-4}``.
            A dict without ``use_muon`` sets options but does not change the parameter's optimizer.
        tp_group: Tensor-parallel process group over which plain parameters are sharded (see docs/tensor_parallel.md).

    Returns:
        The groups. Each has ``params`` (tensors), ``param_names``, ``use_muon``, ``lr`` and ``weight_decay``. `print`
        the result to see the routing table.

    Raises:
        ValueError: No parameter is trainable, an override matches no parameter or does not fit its parameter, or the
            global shape of a parameter is unknown. The message states how to fix the problem.
        TypeError: `model` is not a module, or `lr` is missing.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 50))
        >>> print(param_groups(model, lr=0.02))
        name      shape  matrices  optimizer  reason
        --------  -----  --------  ---------  -----------------------------------------
        0.weight  50x8   -         AdamW      embedding
        1.weight  8x8    1 of 8x8  Muon       linear
        2.weight  50x8   -         AdamW      output head: rows equal a vocabulary (50)
        2.bias    50     -         AdamW      bias
        <BLANKLINE>
        Muon: 1 parameter, 1 matrix, 64 elements
        AdamW: 3 parameters, 850 elements
        AdamW's lr is 1.77 times Muon's, to make its updates as large (no adamw_lr was given)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups needs the model, found {type(model).__name__}: whether a parameter is an embedding, a "
            "head, a convolution or a matrix follows from its module. Pass the module itself"
        )
    place = {} if tp_group is None else {"tp_group": GroupRef.of(tp_group, "tp_group")}
    scale = {} if adjust_lr_fn is None else {"adjust_lr_fn": adjust_lr_fn}
    both: dict[str, Any] = {**place, "lr": given_lr("param_groups", lr), "weight_decay": weight_decay}
    weights, doubts = _route(model, Rule.parse(overrides), place.get("tp_group"))
    trained = [w for w in weights if w.param.requires_grad]
    if not trained:
        raise ValueError(
            f"nothing to optimize: the model has {num_text(len(weights), 'parameter')}, and none requires a "
            "gradient. Call requires_grad_(True) on those to train"
        )
    for w in trained:
        _check_usable(w)
        if w.use_muon:
            w.options, w.matrices = _muon_options(w, {"use_muon": True, **both, **scale})
            # raise ValueError for invalid numbers, such as a negative lr, and for an unknown learning-rate scale
            check_hyperparameters(f"{w.name}: ", {**w.options, "use_muon": False})
    if not any(w.use_muon for w in trained):
        doubts.append("no parameter goes to Muon, all trainable ones go to AdamW; print the groups to see why")
    for doubt in doubts:
        warnings.warn(f"param_groups: {doubt}", stacklevel=2)
    matched = None
    if adamw_lr is None:
        matched = _matched_lr(
            [(*size, lr_scale(w.options.get("adjust_lr_fn"), *size)) for w in trained for size in w.matrices]
        )
        adamw_lr = both["lr"] if matched == 1.0 else both["lr"] * matched
    groups = dict[Any, dict[str, Any]]()
    for w in trained:
        if not w.use_muon:
            still = {} if len(w.shape) > 1 and w.role.decays else {"weight_decay": 0.0}
            w.options = {"use_muon": False, **both, "lr": adamw_lr, **still, **w.rule.options}
        key = tuple((name, id(v) if isinstance(v, Tensor) else repr(v)) for name, v in sorted(w.options.items()))
        group = groups.setdefault(key, {"params": [], "param_names": [], **w.options})
        group["params"].append(w.param)
        group["param_names"].append(w.name)
    rows = [RoutingRow(w.name, w.shape, w.matrices, w.optimizer, w.reason) for w in weights]
    return ParamGroups(sorted(groups.values(), key=lambda group: not group["use_muon"]), rows, matched)


def _matched_lr(updates: Sequence[tuple[int, int, float]]) -> float:
    """Compute the lr of AdamW at which AdamW's updates have the same root mean square as Muon's, as a multiple of
    Muon's lr.

    An orthogonalized matrix has singular values near 1, so the squares of its entries add up to about min(rows, cols).

    Args:
        updates: (rows, cols, learning-rate scale) of each matrix.

    Returns:
        The multiple. It is 1 for `adjust_lr_fn="match_rms_adamw"`, or if there are no matrices.
    """
    total = sum(rows * cols for rows, cols, _ in updates)
    squares = sum(min(rows, cols) * scale**2 for rows, cols, scale in updates)
    # AdamW's updates have a root mean square of 0.2 times AdamW's lr (see docs/learning_rate.md). Rounding to six
    # digits removes rounding errors, so that a multiple of 1 is exact.
    return float(f"{math.sqrt(squares / total) / 0.2:.6g}") if total else 1.0


# ------------------------------------------------------------------------------------------------------- overrides


class Rule(NamedTuple):
    """A routing override, parsed from the user's `overrides` argument.

    Attributes:
        pattern: The user's glob or predicate.
        label: The pattern as text, for messages.
        options: Parameter group options that the override sets. They include `use_muon` if the override assigns
            parameters to Muon or AdamW.
    """

    pattern: _Pattern
    label: str
    options: Mapping[str, Any]

    def matches(self, placed: Placed) -> bool:
        """True if the override's pattern matches a parameter at any of its places in the model (a shared parameter has
        several)."""
        return any(self.fits(place.name, placed.param, place.module) for place in placed.places)

    def fits(self, name: str, param: Tensor, module: nn.Module) -> bool:
        """True if the override's pattern matches a parameter with this name in this module."""
        return fnmatchcase(name, self.pattern) if isinstance(self.pattern, str) else self.pattern(name, param, module)

    @classmethod
    def parse(cls, overrides: Overrides | None) -> list[Rule]:
        """Check a user's overrides and convert them to rules.

        Raises:
            TypeError: The overrides are not pairs, or they are in a set, which has no order.
            ValueError: A choice is not "muon", "adamw" or a dict, or names a group option that does not exist.
        """
        refuse_sets("overrides, of which the first that matches wins,", overrides, "a dict, or a list of pairs")
        pairs: Iterable[Any] = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
        rules = []
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and (isinstance(pair[0], str) or callable(pair[0]))):
                raise TypeError(
                    f"overrides must be pairs (name pattern or predicate, choice), found {pair!r}. "
                    'Write overrides={"*.qkv.weight": {"split_sizes": 8}}'
                )
            pattern, choice = pair
            label = repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
            options = {"use_muon": choice == "muon"} if choice in ("muon", "adamw") else choice
            if not isinstance(options, Mapping):
                raise ValueError(f"override {label}: {choice!r} is not 'muon', 'adamw' or a dict of group options")
            check_keys(f"override {label}: ", options, strict=True)
            rules.append(cls(pattern, label, dict(options)))
        return rules


# ------------------------------------------------------------------------------------------------------- routing


@dataclass(eq=False)
class _RoutedParam(Placed):
    """A parameter and the optimizer chosen for it. The routing functions set the fields step by step.

    Attributes:
        shape, role: The parameter's global shape, and its role in the model.
        rule: The override that applies to the parameter. If there is none, a rule without options.
        settled: Value of `use_muon` that the user chose by an override or by the attribute `p.use_muon`; None if the
            user made no choice.
        use_muon: True for Muon, False for AdamW.
        reason: Reason for the value of `use_muon`.
        options: Options of the parameter's group.
        matrices: (rows, cols) of each matrix that Muon orthogonalizes.
    """

    shape: Ints
    role: Role
    rule: Rule
    settled: bool | None
    use_muon: bool = False
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    matrices: tuple[tuple[int, int], ...] = ()

    @property
    def optimizer(self) -> Literal["Muon", "AdamW", "frozen"]:
        return "frozen" if not self.param.requires_grad else "Muon" if self.use_muon else "AdamW"

    @property
    def is_open(self) -> bool:
        """True if the parameter is trainable and the user has not chosen its optimizer."""
        return self.settled is None and self.param.requires_grad


def _route(model: nn.Module, rules: Sequence[Rule], tp_group: GroupRef | None) -> tuple[list[_RoutedParam], list[str]]:
    """Assign every parameter of a model to Muon or AdamW.

    Returns:
        A pair: the parameters with their assignments, each parameter once, in model order; and a list with one warning
        for each choice that may be wrong.
    """
    found = Placed.all_in(model)
    for rule in rules:
        if not any(map(rule.matches, found)):
            names = [place.name for one in found for place in one.places]
            raise ValueError(
                f"override {rule.label} matches none of the model's {len(names)} parameter names"
                f"{did_you_mean(str(rule.pattern), names, cutoff=0.5)}. A pattern is a glob over the whole name, such "
                "as '*.attn.qkv.weight'"
            )
    weights = [_weight(one, rules, tp_group) for one in found]
    _find_experts(weights)
    heads, doubts = _find_heads(model, weights)
    for w in weights:
        w.use_muon = w.role.use_muon and w.name not in heads if w.settled is None else w.settled
        w.reason = heads.get(w.name, w.role.reason)
        if w.rule.label:
            w.reason = f"{'' if 'use_muon' in w.rule.options else f'{w.reason}, '}override {w.rule.label}"
        elif w.settled is not None:
            w.reason = "p.use_muon"
        elif w.use_muon and w.role.remark:
            w.reason += f", {w.role.remark}"
        if not w.param.requires_grad:
            w.reason = "requires_grad is False"
    read = [w.name for w in weights if VIEW_DEFAULTS.keys() & w.rule.options.keys()]
    return weights, doubts + _doubts_of(weights, {*read, *heads})


def _weight(placed: Placed, rules: Sequence[Rule], tp_group: GroupRef | None) -> _RoutedParam:
    """Determine a parameter's role, and the optimizer that the user has chosen for it (if any) by an override or the
    attribute `use_muon`."""
    rule = next((rule for rule in rules if rule.matches(placed)), Rule("", "", {}))
    given = {"tp_group": tp_group, **rule.options}
    with about(placed.name):
        ref = GroupRef.of(given["tp_group"], "tp_group")
        check_expert(placed.param, given, {"tp_group"} - rule.options.keys())
    shape, role = placed.shape_and_role({"process_group": given.get("process_group"), "tp_group": ref})
    # the user or DeepSpeed may have set the attribute `use_muon` of the parameter
    settled = given.get("use_muon", getattr(placed.param, "use_muon", None))
    if settled is not None and not isinstance(settled, bool):
        raise TypeError(f"{placed.name}: use_muon is {settled!r}. Set it to True or False, or delete it")
    return _RoutedParam(placed.param, placed.places, shape, role, rule, settled)


def _check_usable(w: _RoutedParam) -> None:
    """Raise ValueError if a parameter's matrices are unknown and the user has not assigned it to AdamW, or if an
    override sets options that its optimizer does not have."""
    unclear = w.role.kind == "unclear"
    says_how = unclear and w.settled and "view" in w.rule.options
    if w.role.kind in ("unknown", "unclear") and w.settled is not False and not says_how:
        flatten = f', or {{"{w.name}": {{"use_muon": True, "view": "flatten"}}}} for one matrix' if unclear else ""
        raise ValueError(f'{w.name} {w.role.reason}. Or choose: overrides={{"{w.name}": "adamw"}}{flatten}')
    wrong = sorted(w.rule.options.keys() & (ADAMW_DEFAULTS.keys() if w.use_muon else ONLY_MUON))
    if wrong:
        here, there = ("Muon", "AdamW") if w.use_muon else ("AdamW", "Muon")
        raise ValueError(
            f"{w.name}: override {w.rule.label} sets {wrong[0]}={w.rule.options[wrong[0]]!r}, an option of {there}, "
            f"but the parameter goes to {here} ({w.reason}). Narrow the pattern, or add "
            f'"use_muon": {not w.use_muon}'
        )


def _muon_options(w: _RoutedParam, muon: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """Return a pair for a parameter that is assigned to Muon: the options of its group, and a tuple with (rows, cols)
    of each of its matrices. Error messages name the parameter."""
    view, options = {**VIEW_DEFAULTS, **w.role.view}, w.rule.options
    splits = ("split_sizes", "split_groups")
    # The user's `split_sizes` and `split_groups` replace those of the preset for the module's type.
    if any(key in options for key in splits):
        view |= {key: VIEW_DEFAULTS[key] for key in splits}
    view |= {key: options[key] for key in VIEW_DEFAULTS if key in options}
    with about(f"{w.name} ({w.reason})"):
        matrices = matrix_view(w.shape, **view).matrices
    # Convert a list to a tuple, because parameters are grouped by the `repr` of their options.
    if isinstance(view["split_sizes"], list):
        view["split_sizes"] = tuple(view["split_sizes"])
    made = {**muon, **options, **view}
    changed = {key: value for key, value in made.items() if key not in VIEW_DEFAULTS or value != VIEW_DEFAULTS[key]}
    return changed, tuple((matrix.rows, matrix.cols) for matrix in matrices)


# ---------------------------------------------------------------------------------------------------- output heads


def _find_heads(model: nn.Module, weights: Sequence[_RoutedParam]) -> tuple[dict[str, str], list[str]]:
    """Find the output heads of a model by the rules in [Note: output heads]. `weights` contains all parameters in model
    order, including frozen parameters.

    Returns:
        A pair: a dict from the name of each output head to the reason that the routing table shows, and a list of
        warnings about choices that may be wrong.
    """
    blocks, doubts = _Blocks(weights), list[str]()
    named = _answers(model, "get_output_embeddings", "get_classifier")
    matrices = [w for w in weights if w.role.kind in ("linear", "bare") and len(w.shape) == 2]
    heads = {w.name: f"output head: {named[id(w.param)]}()" for w in matrices if id(w.param) in named}
    linear = [w for w in matrices if w.role.kind == "linear" and w.settled is not True]
    heads |= _with_labels(linear, blocks)
    tables = [w for w in weights if w.role.kind == "embedding" and len(w.shape) == 2]
    words = _answers(model, "get_input_embeddings")
    if any(id(w.param) in words for w in tables):
        tables = [w for w in tables if id(w.param) in words or _is_tied(w)]
    sizes = dict.fromkeys(w.shape[0] for w in tables)
    known = {w.shape[0] for w in matrices if w.name in heads}  # row counts of all output heads found so far
    # Linear layers that the user has assigned to AdamW, and that have as many rows as an embedding, count as heads.
    known |= {w.shape[0] for w in linear if w.settled is False and w.shape[0] in sizes}
    known |= {w.shape[0] for w in tables if id(w.param) in named or _is_tied(w)}
    read = {size for w in weights for size in w.role.reads}
    for size in [size for size in sizes if size not in read]:
        places = [place for w in tables if w.shape[0] == size for place in w.places]
        found = [w for w in linear if w.shape[0] == size and blocks.is_end(w, places)]
        new = [w for w in found if w.name not in heads]
        heads |= {w.name: f"output head: rows equal a vocabulary ({size})" for w in new}
        doubts += _doubt_of_heads(new) if len(found) > 1 or not known <= {size} else []
        known |= {size for _ in new}
    if not named and not known:
        places = [place for w in tables for place in w.places]
        wide = [w for w in linear if w.shape[0] in sizes and not blocks.around(w, places)]
        heads |= {
            w.name: f"output head: last matrix with as many rows as a vocabulary ({w.shape[0]})" for w in wide[-1:]
        }
        doubts += _doubt_of_heads(wide[-1:]) if len(wide) > 1 or not any(map(blocks.is_last, wide)) else []
        last = [w for w in linear if w.settled is None and blocks.is_last(w)] if blocks.paths and not wide else []
        heads |= {w.name: "output head: the last layer, behind all blocks" for w in last}
    return heads, doubts


def _doubt_of_heads(found: Sequence[_RoutedParam]) -> list[str]:
    """Return a list with one warning about layers that are treated as output heads but may be hidden layers, or an
    empty list if the user chose the optimizer for all of these layers."""
    names = [w.name for w in found if w.is_open]
    return [
        f"{listed(names)} went to AdamW as output heads, having as many rows as an embedding ({w.shape[0]}), though "
        "the model has another head, or others have as many: shapes alone do not tell. If right, write "
        f'{_override(names, "adamw")}; "muon" for those that are hidden layers'
        for w in found[:1]
        if names
    ]


def _answers(model: nn.Module, *hooks: str) -> dict[int, str]:
    """Call the methods named in `hooks` on every module that has them. Return a dict from parameter id to the name of
    the method that returned the parameter or a module with it. If a method returned None because the model has no such
    parameter, `id(None)` is a key, so the dict is not empty."""
    found: dict[int, str] = {}
    for module in model.modules():
        for hook in hooks:
            try:
                answer: Any = getattr(module, hook)()
            # Skip modules on which the method `hook` is missing, is abstract or has required arguments.
            except (NotImplementedError, AttributeError, TypeError):
                continue
            for part in answer if isinstance(answer, (tuple, list)) else [answer]:
                found |= {id(p): hook for p in (part.parameters() if isinstance(part, nn.Module) else [part])}
    return found


def _is_tied(table: _RoutedParam) -> bool:
    """True if an embedding's weight is shared with a module that is not an embedding."""
    return not all(place.is_table for place in table.places)


def _with_labels(linear: Sequence[_RoutedParam], blocks: _Blocks) -> dict[str, str]:
    """Find classifiers. In each module with an attribute `num_labels`, the classifier is the last linear layer with
    `num_labels` rows. Return a dict from the name of each classifier's weight to the reason that the routing table
    shows."""
    apart = [w for w in linear if not blocks.around(w)]
    owners = ((w, module) for w in apart for place in w.places for _, module in place.owners)
    found = {id(module): w for w, module in owners if vars(module).get("num_labels") == w.shape[0]}
    return {w.name: f"classifier: num_labels ({w.shape[0]})" for w in found.values()}


class _Blocks:
    """Repeated blocks of a model, such as transformer layers.

    A repeated block is a module that contains two or more matrices. It must also be in a ModuleList or have a sibling
    of the same type. Sibling containers (ModuleList, ModuleDict, Sequential) do not count, because their contents can
    differ. For example, a decoder's layers can be one ModuleList and its extra output heads another.

    Attributes:
        paths: Names of the blocks.
    """

    def __init__(self, weights: Sequence[_RoutedParam]) -> None:
        places = sorted(((p, w) for w in weights for p in w.places), key=lambda pair: pair[0].order)
        matrices = [(p, w) for p, w in places if len(w.shape) > 1 and w.role.kind != "embedding"]
        around = {path: module for place, _ in matrices for path, module in [("", place.owners[-1][1]), *place.paths]}
        num_matrices = Counter(path for place, _ in matrices for path, _ in place.paths)
        types = {path: (path.rpartition(".")[0], type(m)) for path, m in around.items() if num_matrices[path] > 1}
        counts = Counter(one for one in types.values() if one[1] not in (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        self.paths = {
            path for path, one in types.items() if counts[one] > 1 or isinstance(around.get(one[0]), nn.ModuleList)
        }
        # for each module path, the last matrix in the module
        self._last_matrix = {path: weight for place, weight in matrices for path, _ in place.paths}
        self._last_module = places[-1][0].module if places else None

    def around(self, weight: _RoutedParam, tables: Iterable[Place] = ()) -> str | None:
        """Return the name of the outermost repeated block that contains a matrix, or None if no block contains it. A
        module that also contains one of the embeddings in `tables` is a complete model and does not count as a block.
        """
        models = {path for table in tables for path, _ in table.paths}
        return next((p for p, _ in weight.places[0].paths if p in self.paths and p not in models), None)

    def is_end(self, weight: _RoutedParam, tables: Iterable[Place]) -> bool:
        """True if a matrix is in no repeated block, or is the last matrix of its block."""
        block = self.around(weight, tables)
        return block is None or self._last_matrix[block] is weight

    def is_last(self, weight: _RoutedParam) -> bool:
        """True if a parameter belongs to the model's last module with parameters, and this module is in no repeated
        block."""
        return any(place.module is self._last_module for place in weight.places) and not self.around(weight)


# ------------------------------------------------------------------------------------------------ routers and experts


def _find_experts(weights: Sequence[_RoutedParam]) -> None:
    """Find routers, the matrices that choose among experts, and change their roles to "router". A stack of matrices
    that was recognized only by its shape gets the role "matrices" if a router confirms that it contains experts.

    A router has one row per expert and the same input width as the experts. Its module is a sibling of the experts or
    of a module that contains the experts. The experts are either a stack of shape (E, M, N) or a list of E modules. The
    modules must contain only linear layers, unlike transformer blocks, which also have norms.

    One stack decides for all stacks of a module: the first with a matrix dim as large as the router's input width. If
    this is the last dim, which indexes inputs, all of them are confirmed.
    """
    stacks = [w for w in weights if w.role.use_muon and w.role.view.get("view") == "stack"]
    for w in weights:
        if len(w.shape) != 2 or w.shape[0] < 2 or w.role.kind not in ("linear", "bare", "router"):
            continue
        num, width = w.shape
        held = [(place.module, stack) for stack in stacks if stack.shape[0] == num for place in stack.places]
        for module in _beside(w):
            experts = [stack for holder, stack in held if holder is module]
            first = next((stack for stack in experts if width in stack.shape[1:]), None)
            if w.role.kind != "router" and (first is not None or _is_list_of(module, w.shape)):
                w.role = Role("router", f"router: its rows choose among {num} experts", reads=w.shape[1:])
            if first is not None and first.shape[2] == width:
                for stack in (stack for stack in experts if stack.role.kind == "stack"):
                    reason = f"stack of {num} experts, chosen by {w.name}"
                    stack.role = replace(stack.role, kind="matrices", reason=reason)


def _beside(weight: _RoutedParam) -> Iterator[nn.Module]:
    """Yield each of the three nearest ancestors of the module that contains a weight, followed by the ancestor's
    children that do not contain the weight."""
    for place in weight.places:
        for below, module in place.owners[1:4]:
            yield module
            yield from (child for name, child in module.named_children() if name != below.split(".")[0])


def _is_list_of(module: nn.Module, shape: Ints) -> bool:
    """True if a module is a list of experts that a router weight of this shape can choose among. The list must have one
    expert per row of the weight. Each expert must consist of two or more linear layers, and at least one of them must
    have the weight's input width."""
    if not isinstance(module, nn.ModuleList) or len(module) != shape[0]:
        return False
    holders = [[m for m in expert.modules() if m._parameters] for expert in module]
    linear = all(isinstance(m, nn.Linear) for of_expert in holders for m in of_expert)
    return linear and all(len(h) > 1 and shape[1] in [m.in_features for m in h] for h in holders)


# ----------------------------------------------------------------------------------------------------------- warnings

_UNKNOWN = ", which no rule recognizes. It went to Muon as"
_TURNED = '{"transposed": True} if its inputs come first (x @ W), "adamw" if it is'
# Texts for warnings about parameters that were recognized only by their shape. Each entry has a description of the
# parameter, the choice that confirms its optimizer, and the alternatives.
_DOUBTS = {
    "broadcast": (
        " with a leading dim of 1: a table for all of a batch (positions), or a stack of one expert. It went to AdamW "
        "as a table",
        "adamw",
        '{"use_muon": True, "view": "stack"} for a stack',
    ),
    "pairs": (
        " with a last dim of 2, as torch.view_as_real leaves complex numbers. It went to AdamW",
        "adamw",
        '"muon" if it holds matrices of two inputs',
    ),
    "bare": (
        f"{_UNKNOWN} one matrix of (outputs, inputs)",
        "muon",
        f"{_TURNED} an output head, a table, a set of biases or scales",
    ),
    "stack": (
        f"{_UNKNOWN} a stack of matrices, each of (outputs, inputs)",
        "muon",
        f"{_TURNED} a table (positions, codes, biases)",
    ),
}


def _doubts_of(weights: Sequence[_RoutedParam], known: Collection[str]) -> list[str]:
    """Return warnings about parameters whose optimizer was chosen by their shape alone, one for each group of similar
    parameters.

    Args:
        weights: All parameters of the model.
        known: Names of parameters that need no warning.
    """
    alike: dict[tuple[object, ...], list[_RoutedParam]] = {}
    for w in weights:
        if w.is_open and w.name not in known and w.role.kind in _DOUBTS and not _is_positions(w, weights):
            alike.setdefault((type(w.places[0].module), w.places[0].leaf, w.role.kind), []).append(w)
    texts = []
    for w, *more in alike.values():
        what, choice, otherwise = _DOUBTS[w.role.kind]
        others = f"; {len(more)} more like it" if more else ""
        names = dict.fromkeys(numbers_out(one.name) for one in (w, *more)) if more else [w.name]
        kind = type(w.places[0].module).__name__
        texts.append(
            f"{w.name} ({by(w.shape)}{others}) is a parameter of {kind}{what}. If right, write "
            f"{_override(names, choice)}; {otherwise}"
        )
    return texts


def _is_positions(weight: _RoutedParam, weights: Sequence[_RoutedParam]) -> bool:
    """True if a (1, M, N) parameter is certainly a table, such as position embeddings, and not the matrix of a single
    expert. Two conditions must be met: N is the width of a norm in the model, and the parameter's shape allows no
    matrix product with another (1, ..., ...) parameter of the same module."""
    widths = [w.shape[-1:] for w in weights if w.role.kind == "norm"]
    if weight.role.kind != "broadcast" or weight.shape[-1:] not in widths:
        return False
    module = weight.places[0].module
    others = [
        w.shape for w in weights if w.role.kind == "broadcast" and w is not weight and w.places[0].module is module
    ]
    return not any(weight.shape[1] == other[2] or weight.shape[2] == other[1] for other in others)


def _override(names: Iterable[str], choice: str) -> str:
    """Format the source code of an `overrides` argument that maps each parameter name to `choice`."""
    return "overrides={" + ", ".join(f'"{name}": "{choice}"' for name in names) + "}"
