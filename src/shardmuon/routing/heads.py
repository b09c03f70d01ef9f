"""The second look at a model's parameters: output heads, routers and experts, and choices that structure leaves open.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from shardmuon.layout.views import Ints
from shardmuon.routing.presets import Role, numbers_out
from shardmuon.routing.roles import Place, by, is_table

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False, slots=True)
class RoutedParam:
    """A parameter, and what is found out about it step by step.

    Attributes:
        param, places, shape, role: The parameter, where it hangs, its global shape and what it is.
        override, given: Text of the override that matches it ("": none does), and the options that this sets.
        settled: `use_muon`, where the user said it: in an override or as `p.use_muon`.
        use_muon, reason: Where it goes, and why.
        options, matrices: Of its group; (rows, cols) of each matrix that Muon orthogonalizes.
    """

    param: Tensor
    places: tuple[Place, ...]
    shape: Ints
    role: Role
    override: str
    given: Mapping[str, Any]
    settled: bool | None
    use_muon: bool = False
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    matrices: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def optimizer(self) -> Literal["Muon", "AdamW", "frozen"]:
        return "frozen" if not self.param.requires_grad else "Muon" if self.use_muon else "AdamW"

    @property
    def is_open(self) -> bool:
        """True if it is trained and the user has not routed it."""
        return self.settled is None and self.param.requires_grad


# ---------------------------------------------------------------------------------------------------- output heads


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
    known = {w.shape[0] for w in weights if w.name in heads} & {w.shape[0] for w in tables}
    known |= {w.shape[0] for w in tables if id(w.param) in named or _is_tied(w)}  # vocabularies that surely have a head
    needs_guess = not known and not offered and not heads
    ambiguous, doubts = list[tuple[int, list[RoutedParam]]](), list[str]()
    for size in dict.fromkeys(w.shape[0] for w in tables):
        places = [place for w in tables if w.shape[0] == size for place in w.places]
        candidates = [w for w in weights if _may_have_rows(w, size)]
        outside = [w for w in candidates if blocks.around(w, places) is None]
        # a bare matrix reads one of its dims, but which is unknown, so it is no evidence about itself
        if any(size in w.role.reads for c in candidates for w in weights if w is not c or w.role.kind == "linear"):
            ambiguous.append((size, outside))
            continue
        found = [w for w in candidates if w in outside or blocks.last.get(blocks.around(w, places) or "") is w]
        new = [w for w in found if w.name not in heads]
        side = {w.name: "rows" if w.shape[0] == size else "columns" for w in new}
        heads |= {name: f"output head: {which} equal a vocabulary ({size})" for name, which in side.items()}
        open_ones = [w.name for w in new if w.is_open]
        if open_ones and (len(found) > 1 or known - {size}):
            why = "the model has a head for another vocabulary" if known - {size} else "most models have one"
            doubts.append(
                f"{_few(open_ones)} went to AdamW as output heads, having as many rows as an embedding ({size}), "
                f"though {why}. If right, write {_override(open_ones, 'adamw')}; "
                '"muon" for those that are hidden layers'
            )
        needs_guess &= not found
    for size, outside in ambiguous if needs_guess else ():
        if outside and all(w.settled is None for w in outside):  # else the user has named a head among them
            chosen, hidden = outside[-1], [w.name for w in outside[:-1] if w.is_open]
            heads[chosen.name] = f"output head: last matrix with as many rows as a vocabulary ({size})"
            if chosen.is_open and (hidden or chosen is not blocks.last_outside):
                rest = f", and {_few(hidden)} to Muon as hidden layers" if hidden else ""
                doubts.append(
                    f"{size} is the size of a vocabulary and a width of the model, so shapes do not tell an output "
                    f"head from a hidden layer. {chosen.name} went to AdamW as the head{rest}. If right, write "
                    f'{_override([chosen.name], "adamw")}; "muon" if it is a hidden layer'
                )
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
    return [w for w in tables if id(w.param) in named or _is_tied(w)]


def _is_tied(table: RoutedParam) -> bool:
    """True if a module that looks up no rows shares an embedding's weight."""
    return not all(is_table(place.module) for place in table.places)


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
    if not blocks.paths or not listed:
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
    dims = weight.shape[: 2 if weight.role.kind == "bare" else 1]
    return _is_2d(weight) and weight.settled is not True and size in dims


class _Blocks:
    """Repeated blocks: modules that hold two matrices or more, in a ModuleList or beside another one of their type.

    Containers say nothing by their type: a decoder's layers and its list of extra heads are both a ModuleList.

    Attributes:
        paths: Their names.
        last: The last matrix of each module.
        last_outside: The last matrix that is in no block.
    """

    def __init__(self, weights: Sequence[RoutedParam]) -> None:
        matrices = [(p, w) for w in weights for p in w.places if len(w.shape) > 1 and w.role.kind != "embedding"]
        matrices.sort(key=lambda pair: pair[0].order)
        around = {path: module for place, _ in matrices for path, module in [("", place.owners[-1][1]), *place.paths]}
        self.last = {path: weight for place, weight in matrices for path, _ in place.paths}
        num_matrices = Counter(path for place, _ in matrices for path, _ in place.paths)
        types = {path: (path.rpartition(".")[0], type(m)) for path, m in around.items() if num_matrices[path] > 1}
        counts = Counter(one for one in types.values() if one[1] not in _CONTAINERS)
        self.paths = {
            path for path, one in types.items() if counts[one] > 1 or isinstance(around.get(one[0]), nn.ModuleList)
        }
        outside = [weight for place, weight in matrices if self.paths.isdisjoint(path for path, _ in place.paths)]
        self.last_outside = outside[-1] if outside else None

    def around(self, weight: RoutedParam, tables: Iterable[Place]) -> str | None:
        """The outermost block around a matrix. One that also holds the embedding is a model in itself, no block."""
        models = {path for table in tables for path, _ in table.paths}
        return next((p for p, _ in weight.places[0].paths if p in self.paths and p not in models), None)


# ------------------------------------------------------------------------------------------------ routers and experts


def find_experts(weights: Sequence[RoutedParam]) -> dict[str, str]:
    """Make routers of the matrices that choose among experts, and biases of the rows that lie beside them.

    A router has as many rows as there are experts, stands beside them or in the module around, and reads what they
    read. Experts are a stack (E, M, N), or a list of E modules of linear layers alone: a list of a model's blocks has
    norms, too.

    Returns:
        name -> reason, of each stack that only its shape speaks for and a router confirms: it reads as many features as
        the first of the stacks that has so many on one side, which are inputs then.
    """
    stacks: dict[int, list[RoutedParam]] = {}
    for w in weights:
        if w.role.kind in ("bare", "matrices") and w.role.view.get("view") == "stack":
            for place in w.places:
                stacks.setdefault(id(place.module), []).append(w)
    found: dict[str, str] = {}
    for w in weights:
        if len(w.shape) != 2 or w.shape[0] < 2 or w.role.kind not in ("linear", "bare", "router"):
            continue
        num, width = w.shape
        for module in _beside(w):
            experts = [stack for stack in stacks.get(id(module), ()) if stack.shape[0] == num]
            first = next((stack for stack in experts if width in stack.shape[1:]), None)
            if w.role.kind != "router" and (first is not None or _is_list_of(module, w.shape)):
                w.role = Role("router", f"router: its rows choose among {num} experts", reads=w.shape[1:])
            if first is not None and first.shape[2] == width:
                reason = f"stack of {num} experts, chosen by {w.name}"
                found |= {stack.name: reason for stack in experts if stack.role.kind == "bare"}
        own = [stack.shape for place in w.places for stack in stacks.get(id(place.module), ())]
        if w.role.kind != "router" and any(shape[0] == num and width in shape[1:] for shape in own):
            reason = f"a row for each of {num} experts: biases, or a router"
            w.role = Role("entries", reason, reads=w.shape, decays=False)
    return found


def _beside(weight: RoutedParam) -> Iterator[nn.Module]:
    """The modules around the one that holds a weight, up to the third, and their children on other branches."""
    for place in weight.places:
        for below, module in place.owners[1:4]:
            yield module
            yield from (child for name, child in module.named_children() if name != below.split(".")[0])


def _is_list_of(module: nn.Module, shape: Ints) -> bool:
    """True if a module lists as many experts as a weight has rows, each made of linear layers that take its inputs."""
    if not isinstance(module, nn.ModuleList) or len(module) != shape[0]:
        return False
    holders = [[m for m in expert.modules() if m._parameters] for expert in module]
    linear = all(isinstance(m, nn.Linear) for of_expert in holders for m in of_expert)
    return linear and all(len(h) > 1 and shape[1] in [m.in_features for m in h] for h in holders)


# ------------------------------------------------------------------------------------------------------------- doubts


def doubts_of(weights: Sequence[RoutedParam], known: Collection[str]) -> list[str]:
    """A text for each kind of parameters that only their shape speaks for.

    Args:
        weights: All parameters of the model.
        known: Names of those that are settled.
    """
    tables = [w.name for w in weights if w.role.kind == "broadcast" and w.is_open and not _is_positions(w, weights)]
    texts = [
        f"{', '.join(tables)}: a (1, M, N) parameter is a table for all of a batch (positions) or a stack of one "
        f"expert. It went to AdamW as a table. If right, write {_override([name], 'adamw')}; "
        '{"use_muon": True, "view": "stack"} for a stack'
        for name in tables[:1]
    ]
    alike: dict[tuple[object, ...], list[RoutedParam]] = {}
    for w in weights:
        if w.is_open and w.name not in known and len(w.shape) in (2, 3) and w.role.kind in ("pairs", "bare"):
            alike.setdefault((type(w.places[0].module), w.places[0].leaf, len(w.shape)), []).append(w)
    return texts + [_doubt(found) for found in alike.values()]


def _doubt(found: Sequence[RoutedParam]) -> str:
    """Text on parameters that are alike in what speaks for them."""
    w, more = found[0], f"; {len(found) - 1} more like it" if len(found) > 1 else ""
    text = f"{w.name} ({by(w.shape)}{more}) is a parameter of {type(w.places[0].module).__name__}"
    names = [w.name] if len(found) == 1 else list(dict.fromkeys(numbers_out(one.name) for one in found))
    if w.role.kind == "pairs":
        return (
            f"{text} with a last dim of 2, as torch.view_as_real leaves complex numbers. It went to AdamW. If right, "
            f'write {_override(names, "adamw")}; "muon" if it holds matrices of two inputs'
        )
    went, table = "one matrix", "a table, a set of biases or scales"
    if len(w.shape) == 3:
        went, table = f"a stack of {w.shape[0]} matrices, each", "a table (positions, codes, biases)"
    return (
        f"{text}, of which no rule knows what it is. It went to Muon as {went} of (outputs, inputs). If right, write "
        f'{_override(names, "muon")}; {{"transposed": True}} if its inputs come first (x @ W), "adamw" if it is {table}'
    )


def _is_positions(weight: RoutedParam, weights: Sequence[RoutedParam]) -> bool:
    """True if a (1, M, N) parameter is surely a table, as positions are: its rows are as wide as a norm, and no other
    in its module takes what it gives, or gives what it takes, as the two matrices of a stack of one expert do."""
    _, rows, cols = weight.shape
    held = (p for place in weight.places for p in place.module._parameters.values() if p is not weight.param)
    others = [tuple(p.shape) for p in held if p is not None and p.ndim == 3 and p.shape[0] == 1]
    widths = {w.shape[-1] for w in weights if w.role.kind == "norm"}
    return cols in widths and not any(rows == other[2] or cols == other[1] for other in others)


def _override(names: Iterable[str], choice: str) -> str:
    """The line that a user may write to settle how these parameters are routed."""
    return "overrides={" + ", ".join(f'"{name}": "{choice}"' for name in names) + "}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
