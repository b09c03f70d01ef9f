"""Output heads among the matrices. Part of the routing of groups.py; reads the model's structure only.

[Note: output heads]
    A head turns features into one number per entry of a vocabulary, and its rows are about entries as an embedding's
    are. Nothing in torch says "head", so, in this order:
    1. A weight shared with an embedding is one (roles.py), and so is what the model names: `get_output_embeddings()`
       (Hugging Face), `get_classifier()` (timm), the last linear layer with `num_labels` rows of a module that has that
       number (Hugging Face's classifiers).
    2. Let V be the number of rows of an embedding (where `get_input_embeddings()` names them, of those: a table of
       positions or token types is no vocabulary), and let nothing in the model read V features (no layer with V
       inputs, no norm or embedding of width V). A matrix with V rows then ends in logits, and is a head. Within a
       repeated block that holds for the block's last matrix only: in a model of bytes, 4 key-value heads of 64
       make 256 rows, too.
    3. If V is also a width of the model (256 bytes, width 256), shapes cannot tell a head from a hidden layer. If
       neither 1 nor 2 found a head, it is the last matrix with V rows outside the repeated blocks.
    4. If the model names none and there is none yet, it is the last module with weights, if that is a linear layer
       behind repeated blocks: a classifier, whatever its number of labels.
    Where that may be wrong, a doubt is returned that says what was chosen and which override settles it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardmuon.layout.views import Ints
from shardmuon.routing.overrides import Rule, few, override_text
from shardmuon.routing.presets import Role
from shardmuon.routing.roles import Place, is_table

__all__ = ["RoutedParam", "find_heads"]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False, slots=True)
class RoutedParam:
    """A parameter, and what is found out about it step by step.

    Attributes:
        param, places, shape, role: The parameter, where it hangs, its global shape and what it is.
        rule: The override that matches it.
        settled: `use_muon`, where the user said it: in an override or as `p.use_muon`.
        use_muon, reason: Where it goes, and why.
    """

    param: Tensor
    places: tuple[Place, ...]
    shape: Ints
    role: Role
    rule: Rule | None
    settled: bool | None
    use_muon: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def given(self) -> Mapping[str, Any]:
        """Options that the override sets."""
        return {} if self.rule is None else self.rule.options

    @property
    def is_open(self) -> bool:
        """True if it is trained and the user has not routed it."""
        return self.settled is None and self.param.requires_grad


def find_heads(model: nn.Module, weights: Sequence[RoutedParam]) -> tuple[dict[str, str], list[str]]:
    """Find the output heads among matrices. See [Note: output heads].

    Args:
        model: The model.
        weights: All its parameters in model order, also frozen ones.

    Returns:
        name -> reason for each head, and a text for each choice that may be wrong.
    """
    answers = [_parameters_of(model, hook) for hook in ("get_output_embeddings", "get_classifier")]
    offered = any(answer is not None for answer in answers)
    named = {key: hook for answer in answers if answer is not None for key, hook in answer.items()}
    heads = {w.name: f"output head: {named[id(w.param)]}" for w in weights if id(w.param) in named and _is_2d(w)}
    blocks = _Blocks(weights)
    heads |= _with_labels(weights, blocks)
    tables = _vocabularies(model, weights)
    sizes = {w.shape[0] for w in tables}
    known = {w.shape[0] for w in weights if w.name in heads} & sizes  # vocabularies that surely have a head
    known |= {w.shape[0] for w in tables if id(w.param) in named or not all(is_table(p.module) for p in w.places)}
    needs_guess = not known and not offered and not heads
    ambiguous, doubts = [], []
    for size in dict.fromkeys(w.shape[0] for w in tables):
        places = [place for w in tables if w.shape[0] == size for place in w.places]
        candidates = [w for w in weights if _may_have_rows(w, size)]
        outside = [w for w in candidates if blocks.around(w, places) is None]
        if any(_is_width(size, w, weights) for w in candidates):
            ambiguous.append((size, outside))
            continue
        found = [w for w in candidates if w in outside or blocks.last(blocks.around(w, places)) is w]
        new = [w for w in found if w.name not in heads]
        heads |= {w.name: f"output head: {_side(w, size)} equal a vocabulary ({size})" for w in new}
        if len(found) > 1 or known - {size}:
            doubts += _doubt_shape(new, size, elsewhere=bool(known - {size}))
        needs_guess &= not found
    if needs_guess:
        for size, outside in ambiguous:
            chosen = _last(outside)
            if chosen is not None:
                heads[chosen.name] = f"output head: last matrix with as many rows as a vocabulary ({size})"
                doubts += _doubt_position(chosen, outside, size, blocks.last_outside)
    if not heads and not offered and not known:
        heads |= _last_of_all(weights, blocks)
    return heads, doubts


def _parameters_of(model: nn.Module, hook: str) -> dict[int, str] | None:
    """id of each parameter in the answers of all modules that have a method -> its name; None: none answers."""
    found: dict[int, str] | None = None
    for method in (getattr(module, hook, None) for module in model.modules()):
        try:
            answer = method() if callable(method) else NotImplemented
        except (NotImplementedError, AttributeError, TypeError):  # not for this model; or another method of that name
            continue
        if answer is not NotImplemented:
            parts = answer if isinstance(answer, (tuple, list)) else [answer]
            params = (p for part in parts for p in (part.parameters() if isinstance(part, nn.Module) else [part]))
            found = (found or {}) | {id(p): f"{hook}()" for p in params}
    return found


def _vocabularies(model: nn.Module, weights: Sequence[RoutedParam]) -> list[RoutedParam]:
    """Embeddings whose entries may be outputs, too: those that the model names, if it does, else all."""
    tables = [w for w in weights if w.role.kind == "embedding" and len(w.shape) == 2]
    named = _parameters_of(model, "get_input_embeddings") or {}
    if not any(id(w.param) in named for w in tables):
        return tables
    return [w for w in tables if id(w.param) in named or not all(is_table(p.module) for p in w.places)]


def _with_labels(weights: Sequence[RoutedParam], blocks: _Blocks) -> dict[str, str]:
    """The classifiers of modules that have a `num_labels`: the last linear layer with so many rows below each."""
    apart = [w for w in weights if w.role.kind == "linear" and w.settled is not True and not blocks.around(w, ())]
    owners = ((w, module) for w in apart for place in w.places for _, module in place.owners)
    found = {id(m): w for w, m in owners if (labels := vars(m).get("num_labels")) is not True and labels == w.shape[0]}
    return {w.name: f"classifier: num_labels ({w.shape[0]})" for w in found.values()}


def _last_of_all(weights: Sequence[RoutedParam], blocks: _Blocks) -> dict[str, str]:
    """The last module with weights, if it is a linear layer behind repeated blocks."""
    places = [(place, w) for w in weights for place in w.places]
    listed = [pair for pair in places if pair[0].leaf != "bias"]
    if not blocks.any or not listed:
        return {}
    last, weight = max(listed, key=lambda pair: pair[0].order)
    behind = all(place.order <= last.order for place, _ in places if place.module is not last.module)
    if not behind or weight.role.kind != "linear" or weight.settled is not None or blocks.around(weight, ()):
        return {}
    return {weight.name: "output head: the last layer, behind all blocks"}


def _is_2d(weight: RoutedParam) -> bool:
    return weight.role.kind in ("linear", "bare") and len(weight.shape) == 2


def _may_have_rows(weight: RoutedParam, size: int) -> bool:
    """True if a matrix may give `size` outputs: by its rows, or by either dim where nothing says which are inputs."""
    if not _is_2d(weight) or weight.settled is True:
        return False
    return weight.shape[0] == size or (weight.role.kind == "bare" and weight.shape[1] == size)


def _is_width(size: int, candidate: RoutedParam, weights: Iterable[RoutedParam]) -> bool:
    """True if something reads `size` features. A bare matrix reads one of its dims, but which is unknown, so it is no
    evidence about itself."""
    return any(size in w.role.reads for w in weights if w is not candidate or w.role.kind == "linear")


def _last(outside: Sequence[RoutedParam]) -> RoutedParam | None:
    """The last matrix by position, unless the user named a head among them."""
    return outside[-1] if outside and all(w.settled is None for w in outside) else None


def _side(weight: RoutedParam, size: int) -> str:
    return "rows" if weight.shape[0] == size else "columns"


def _doubt_shape(taken: Sequence[RoutedParam], size: int, *, elsewhere: bool) -> list[str]:
    open_ones = [w.name for w in taken if w.is_open]
    if not open_ones:
        return []
    why = "the model has a head for another vocabulary" if elsewhere else "most models have one"
    settle = override_text(open_ones, "adamw")
    return [
        f"{few(open_ones)} went to AdamW as output heads, having as many rows as an embedding ({size}), though {why}. "
        f'If right, write {settle}; "muon" for those that are hidden layers'
    ]


def _doubt_position(
    chosen: RoutedParam, outside: Sequence[RoutedParam], size: int, last: RoutedParam | None
) -> list[str]:
    hidden = [w.name for w in outside if w is not chosen and w.is_open]
    if not chosen.is_open or (not hidden and chosen is last):
        return []
    rest = f", and {few(hidden)} to Muon as hidden layers" if hidden else ""
    return [
        f"{size} is the size of a vocabulary and a width of the model, so shapes do not tell an output head from a "
        f"hidden layer. {chosen.name} went to AdamW as the head{rest}. If right, write "
        f"{override_text([chosen.name], 'adamw')}; "
        '"muon" if it is a hidden layer'
    ]


class _Blocks:
    """Repeated blocks: modules that hold two matrices or more, in a ModuleList or beside another one of their type.

    Containers say nothing by their type: a decoder's layers and its list of extra heads are both a ModuleList.
    """

    def __init__(self, weights: Sequence[RoutedParam]) -> None:
        matrices = [(p, w) for w in weights for p in w.places if len(w.shape) > 1 and w.role.kind != "embedding"]
        matrices.sort(key=lambda pair: pair[0].order)
        around = {path: module for place, _ in matrices for path, module in [("", place.owners[-1][1]), *place.paths]}
        self._last = {path: weight for place, weight in matrices for path, _ in place.paths}
        num_matrices = Counter(path for place, _ in matrices for path, _ in place.paths)
        types = {path: (path.rpartition(".")[0], type(m)) for path, m in around.items() if num_matrices[path] > 1}
        counts = Counter(one for one in types.values() if one[1] not in _CONTAINERS)
        self._paths = {
            path for path, one in types.items() if counts[one] > 1 or isinstance(around.get(one[0]), nn.ModuleList)
        }
        outside = [weight for place, weight in matrices if self._paths.isdisjoint(path for path, _ in place.paths)]
        self.last_outside = outside[-1] if outside else None

    @property
    def any(self) -> bool:
        """True if there are repeated blocks."""
        return bool(self._paths)

    def around(self, weight: RoutedParam, tables: Iterable[Place]) -> str | None:
        """The outermost block around a matrix. One that also holds the embedding is a model in itself, no block."""
        models = {path for table in tables for path, _ in table.paths}
        return next((p for p, _ in weight.places[0].paths if p in self._paths and p not in models), None)

    def last(self, block: str | None) -> RoutedParam | None:
        """The last matrix of a block."""
        return None if block is None else self._last[block]
