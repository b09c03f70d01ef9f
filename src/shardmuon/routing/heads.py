"""Second pass over a model's parameters: finds output heads, routers and experts, and choices that may be wrong.

[Note: output heads]
    An output head turns features into one number per vocabulary entry, so each of its rows belongs to one entry, as in
    an embedding. Nothing in torch marks heads, so these rules apply in order:
    1. Heads are the weights shared with an embedding (roles.py) and the layers that the model names:
       `get_output_embeddings()` (Hugging Face), `get_classifier()` (timm), and, in a module with an attribute
       `num_labels` (Hugging Face's classifiers), the last linear layer with `num_labels` rows.
    2. Let V be the number of rows of an embedding, and let nothing in the model read V features (no layer has V inputs,
       no norm or embedding has width V). Then a linear layer with V rows outputs logits, and is a head. If
       `get_input_embeddings()` names embeddings, only these count, because tables of positions or token types are not
       vocabularies. Within a repeated block, the rule holds only for the block's last matrix: in a byte-level model,
       4 key-value heads of 64 also make 256 rows.
    3. If the model names no head and none has been found, V may also be a width of the model (256 bytes, width 256).
       The head is then the last linear layer with V rows outside of the repeated blocks. If there is no such layer, the
       head is the linear layer of the model's last module, provided that this module comes after repeated blocks. It is
       then a classifier with any number of labels.
    If the choice may be wrong, a warning says what was chosen and which override confirms or corrects it.
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
from shardmuon.texts import listed

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class RoutedParam:
    """A parameter and the choice of its optimizer, filled in step by step.

    Attributes:
        param, places, shape, role: The parameter, its places in the model, its global shape and its role.
        override, given: Text of the matching override ("" for none), and the options that it sets.
        settled: The user's choice of `use_muon`, by an override or as attribute `p.use_muon`; None: no choice.
        use_muon, reason: True for Muon, False for AdamW; and the reason for the choice.
        options: Options of the parameter's group.
        matrices: (rows, cols) of each matrix that Muon orthogonalizes.
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
    def module(self) -> nn.Module:
        return self.places[0].module

    @property
    def optimizer(self) -> Literal["Muon", "AdamW", "frozen"]:
        return "frozen" if not self.param.requires_grad else "Muon" if self.use_muon else "AdamW"

    @property
    def is_open(self) -> bool:
        """True if the parameter is trainable and the user has not chosen its optimizer."""
        return self.settled is None and self.param.requires_grad


# ---------------------------------------------------------------------------------------------------- output heads


def find_heads(model: nn.Module, weights: Sequence[RoutedParam]) -> tuple[dict[str, str], list[str]]:
    """Find the matrices that are output heads, by the rules of [Note: output heads].

    Args:
        model: The model.
        weights: All parameters of the model in model order, including frozen parameters.

    Returns:
        Parameter name -> reason, for each head; and a warning text for each choice that may be wrong.
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
    known = {w.shape[0] for w in matrices if w.name in heads}  # row counts of all heads so far
    known |= {w.shape[0] for w in linear if w.settled is False and w.shape[0] in sizes}  # heads chosen by the user
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


def _doubt_of_heads(found: Sequence[RoutedParam]) -> list[str]:
    """Make a warning about output heads that may be hidden layers. Returns a list of at most one text, which is empty
    if the user has chosen the optimizer of all these parameters."""
    names = [w.name for w in found if w.is_open]
    return [
        f"{listed(names)} went to AdamW as output heads, having as many rows as an embedding ({w.shape[0]}), though "
        "the model has another head, or others have as many: shapes alone do not tell. If right, write "
        f'{_override(names, "adamw")}; "muon" for those that are hidden layers'
        for w in found[:1]
        if names
    ]


def _answers(model: nn.Module, *hooks: str) -> dict[int, str]:
    """Call these methods on all modules that have them, and collect the parameters in the results.

    Returns:
        id of a parameter -> name of the method that returned it. If a method returns None (the model has no such
        parameter), the dict gets the key `id(None)`, so that it is empty only if no module has the methods.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        for hook in hooks:
            try:
                answer: Any = getattr(module, hook)()
            except (NotImplementedError, AttributeError, TypeError):  # missing, abstract, or of another meaning
                continue
            for part in answer if isinstance(answer, (tuple, list)) else [answer]:
                found |= {id(p): hook for p in (part.parameters() if isinstance(part, nn.Module) else [part])}
    return found


def _is_tied(table: RoutedParam) -> bool:
    """True if an embedding's weight is shared with a module that is not an embedding."""
    return not all(is_table(place.module) for place in table.places)


def _with_labels(linear: Sequence[RoutedParam], blocks: _Blocks) -> dict[str, str]:
    """Find the classifiers in modules with an attribute `num_labels`: the last linear layer with `num_labels` rows.
    Returns parameter name -> reason."""
    apart = [w for w in linear if not blocks.around(w)]
    owners = ((w, module) for w in apart for place in w.places for _, module in place.owners)
    found = {id(module): w for w, module in owners if vars(module).get("num_labels") == w.shape[0]}
    return {w.name: f"classifier: num_labels ({w.shape[0]})" for w in found.values()}


class _Blocks:
    """Repeated blocks of a model: modules with two or more matrices that are in a ModuleList or have a sibling of the
    same type. Containers do not count as siblings of the same type, since a decoder's layers and its extra heads may
    both be ModuleLists.

    Attributes:
        paths: Names of the blocks.
    """

    def __init__(self, weights: Sequence[RoutedParam]) -> None:
        places = sorted(((p, w) for w in weights for p in w.places), key=lambda pair: pair[0].order)
        matrices = [(p, w) for p, w in places if len(w.shape) > 1 and w.role.kind != "embedding"]
        around = {path: module for place, _ in matrices for path, module in [("", place.owners[-1][1]), *place.paths]}
        num_matrices = Counter(path for place, _ in matrices for path, _ in place.paths)
        types = {path: (path.rpartition(".")[0], type(m)) for path, m in around.items() if num_matrices[path] > 1}
        counts = Counter(one for one in types.values() if one[1] not in _CONTAINERS)
        self.paths = {
            path for path, one in types.items() if counts[one] > 1 or isinstance(around.get(one[0]), nn.ModuleList)
        }
        # module path -> the last matrix in the module
        self._last_matrix = {path: weight for place, weight in matrices for path, _ in place.paths}
        self._last_module = places[-1][0].module if places else None

    def around(self, weight: RoutedParam, tables: Iterable[Place] = ()) -> str | None:
        """Find the name of the outermost repeated block that contains a matrix, or None. A module that also contains
        one of `tables` (embeddings) is a complete model and does not count as a block."""
        models = {path for table in tables for path, _ in table.paths}
        return next((p for p, _ in weight.places[0].paths if p in self.paths and p not in models), None)

    def is_end(self, weight: RoutedParam, tables: Iterable[Place]) -> bool:
        """True if a matrix is in no repeated block, or is the last matrix of its block."""
        block = self.around(weight, tables)
        return block is None or self._last_matrix[block] is weight

    def is_last(self, weight: RoutedParam) -> bool:
        """True if a parameter belongs to the last module with parameters, and this module is in no repeated block."""
        return any(place.module is self._last_module for place in weight.places) and not self.around(weight)


# ------------------------------------------------------------------------------------------------ routers and experts


def find_experts(weights: Sequence[RoutedParam]) -> dict[str, str]:
    """Find the matrices that choose among experts, and change their roles to "router".

    A router has as many rows as there are experts and the same input width. It is a sibling of the experts or of a
    module that contains them. Experts are a stack (E, M, N), or a list of E modules that contain only linear layers
    (unlike a list of transformer blocks, which also have norms).

    Returns:
        Parameter name -> reason, for stacks that only their shape suggests to be experts and that a router confirms.
        The router's input width must be the last dim (the inputs) of the first stack that has this width in either dim.
    """
    stacks: dict[nn.Module, list[RoutedParam]] = {}
    for w in weights:
        if w.role.use_muon and w.role.view.get("view") == "stack":
            for place in w.places:
                stacks.setdefault(place.module, []).append(w)
    found: dict[str, str] = {}
    for w in weights:
        if len(w.shape) != 2 or w.shape[0] < 2 or w.role.kind not in ("linear", "bare", "router"):
            continue
        num, width = w.shape
        for module in _beside(w):
            experts = [stack for stack in stacks.get(module, ()) if stack.shape[0] == num]
            first = next((stack for stack in experts if width in stack.shape[1:]), None)
            if w.role.kind != "router" and (first is not None or _is_list_of(module, w.shape)):
                w.role = Role("router", f"router: its rows choose among {num} experts", reads=w.shape[1:])
            if first is not None and first.shape[2] == width:
                reason = f"stack of {num} experts, chosen by {w.name}"
                found |= {stack.name: reason for stack in experts if stack.role.kind == "stack"}
    return found


def _beside(weight: RoutedParam) -> Iterator[nn.Module]:
    """Yield the three nearest ancestors of the module that holds a weight, and the ancestors' other children, which do
    not contain the weight."""
    for place in weight.places:
        for below, module in place.owners[1:4]:
            yield module
            yield from (child for name, child in module.named_children() if name != below.split(".")[0])


def _is_list_of(module: nn.Module, shape: Ints) -> bool:
    """True if a module is a list of experts that a weight of this shape could choose among: one expert per row, each
    made of linear layers, at least one of which has the weight's input width."""
    if not isinstance(module, nn.ModuleList) or len(module) != shape[0]:
        return False
    holders = [[m for m in expert.modules() if m._parameters] for expert in module]
    linear = all(isinstance(m, nn.Linear) for of_expert in holders for m in of_expert)
    return linear and all(len(h) > 1 and shape[1] in [m.in_features for m in h] for h in holders)


# ----------------------------------------------------------------------------------------------------------- warnings

_UNKNOWN = ", of which no rule knows what it is. It went to Muon as"
_TURNED = '{"transposed": True} if its inputs come first (x @ W), "adamw" if it is'
# Kind of parameter that was recognized by shape alone -> (text that says what the parameter may be and which optimizer
# gets it, override that confirms the choice, text with overrides for the alternatives)
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


def doubts_of(weights: Sequence[RoutedParam], known: Collection[str]) -> list[str]:
    """Make warning texts about parameters whose optimizer was chosen by shape alone. Similar parameters share one text.

    Args:
        weights: All parameters of the model.
        known: Names of parameters that need no warning.
    """
    alike: dict[tuple[object, ...], list[RoutedParam]] = {}
    for w in weights:
        if w.is_open and w.name not in known and w.role.kind in _DOUBTS and not _is_positions(w, weights):
            alike.setdefault((type(w.module), w.places[0].leaf, w.role.kind), []).append(w)
    texts = []
    for w, *more in alike.values():
        what, choice, otherwise = _DOUBTS[w.role.kind]
        others = f"; {len(more)} more like it" if more else ""
        names = dict.fromkeys(numbers_out(one.name) for one in (w, *more)) if more else [w.name]
        texts.append(
            f"{w.name} ({by(w.shape)}{others}) is a parameter of {type(w.module).__name__}{what}. If right, write "
            f"{_override(names, choice)}; {otherwise}"
        )
    return texts


def _is_positions(weight: RoutedParam, weights: Sequence[RoutedParam]) -> bool:
    """True if a (1, M, N) parameter is certainly a table, such as position embeddings, and not the matrix of a single
    expert: its rows are as wide as a norm, and no other (1, M, N) parameter of its module has a shape that could be
    multiplied with it."""
    widths = [w.shape[-1:] for w in weights if w.role.kind == "norm"]
    if weight.role.kind != "broadcast" or weight.shape[-1:] not in widths:
        return False
    others = [w.shape for w in weights if w.role.kind == "broadcast" and w is not weight and w.module is weight.module]
    return not any(weight.shape[1] == other[2] or weight.shape[2] == other[1] for other in others)


def _override(names: Iterable[str], choice: str) -> str:
    """Make the source code of an `overrides` argument that gives all these parameters the same choice."""
    return "overrides={" + ", ".join(f'"{name}": "{choice}"' for name in names) + "}"
