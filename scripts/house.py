"""Measure the size and structure of the code and the cost of an optimizer step. Print each value beside its target.

    make house                                       # measures all rows, which takes a minute or two
    python scripts/house.py --only 4 5 --list        # measures two rows, and lists lines that may swallow exceptions

The script writes no files. A row that fails does not stop the other rows. Counts depend only on the code and on the
versions of torch and Python. Rows 8 and 9 are ratios of times measured on the same machine.

[Note: calls]
    A call is counted when a frame of a function in src/shardmuon starts. A generator that resumes does not start a new
    frame. C calls are the calls to C functions that these frames make. Row 1 leaves out the frames of comprehensions
    and generator expressions, but not their C calls. Row 2 counts all frames, so its numbers are lower on Python 3.12,
    which inlines comprehensions.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib.util
import inspect
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "shardmuon"

Function = tuple[str, int, str]  # (file, first line, name) of a function
Graph = Mapping[str, Collection[str]]  # module -> the modules it imports
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
# Question words, prepositions and pronouns: no docstring should open with one.
BAD_OPENING = re.compile(
    r"\W*(how|what|when|where|whether|which|who|whose|why|about|after|against|among|around|as|at|because|before|between|by"
    r"|during|for|from|if|in|into|like|of|on|out|over|since|than|through|to|under|until|upon|with|within|without|he|her|his"
    r"|i|it|its|she|that|their|them|they|this|these|those|we|you|your)\b",
    re.IGNORECASE,
)
# Parts of the package of which a training step needs little or nothing. Row 4 leaves them out.
APART = ("price/", "foresight/", "auditing/", "testing/", "commands/")


def sources(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """Parse all Python files in a folder. Return a dict from relative path to syntax tree."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in paths}


# ------------------------------------------------------------------------------------------------------------ a step


class Calls(NamedTuple):
    """Number of calls to each Python function in a folder, and number of calls from these functions to C functions."""

    of_function: Counter[Function]
    num_c: int

    def __str__(self) -> str:
        """Format the counts as "calls / functions / files"."""
        files = {file for file, _, _ in self.of_function}
        return f"{self.of_function.total()} / {len(self.of_function)} / {len(files)}"


def watch(call: Callable[[], object], folder: Path = PACKAGE, comprehensions: bool = False) -> Calls:
    """Run `call`, and count the calls to functions that are defined in `folder` (see [Note: calls])."""
    found: Counter[Function] = Counter()
    generators: set[FrameType] = set()
    num_c = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_c
        code = frame.f_code
        if not code.co_filename.startswith(f"{folder}{os.sep}"):
            return
        num_c += event == "c_call"
        if event == "call" and frame not in generators and (comprehensions or code.co_name not in COMPREHENSIONS):
            found[os.path.relpath(code.co_filename, folder), code.co_firstlineno, code.co_name] += 1
            if code.co_flags & inspect.CO_GENERATOR:
                generators.add(frame)

    gc.collect()
    gc.disable()  # finalizers of unrelated objects must not be counted
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Calls(found, num_c)


@functools.cache
def plain_step() -> Calls:
    """Count the function calls in one optimizer step, after warm-up. The step updates a matrix and a vector in a single
    process."""
    from torch import nn

    step = muon_step([nn.Parameter(filled(8, 16))], [nn.Parameter(filled(16))])
    return warm(step, comprehensions=False)


@functools.cache
def sharded_step() -> Calls:
    """Count the calls in one optimizer step that updates two FSDP2 matrices on two ranks, after warm-up. Return the
    counts of the rank with more calls."""
    from shardmuon.testing import RankPool

    with RankPool(2) as pool:
        return max((Calls(*found) for found in pool.run(on_rank)), key=lambda calls: calls.of_function.total())


def on_rank() -> tuple[Counter[Function], int]:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from shardmuon.testing.layouts import mesh_of

    model: nn.Module = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    fully_shard(model, mesh=mesh_of((2,)))
    return tuple(warm(muon_step(list(model.parameters()), []), comprehensions=True))  # type: ignore[return-value]


def warm(step: Callable[[], object], comprehensions: bool) -> Calls:
    for _ in range(3):
        step()
    return watch(step, comprehensions=comprehensions)


def muon_step(matrices: list[Any], vectors: list[Any]) -> Callable[[], object]:
    """Set the parameters' gradients, build a `Muon` with matrix products in fp32, and return its `step` method."""
    import torch

    from shardmuon import Muon

    for p in [*matrices, *vectors]:
        p.grad = torch.full_like(p, 0.1) + p.detach()
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "use_muon": False}]
    return Muon([group for group in groups if group["params"]], lr=0.01, ns_dtype=torch.float32).step


def filled(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ----------------------------------------------------------------------------------------------------- single files


def lengths(functions: Iterable[Function], trees: Mapping[str, ast.Module]) -> list[int]:
    """Count the lines of each function, without its docstring, and return the sorted counts. Lambdas and comprehensions
    belong to the function that contains them."""
    known = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                known[file, first, node.name] = num_lines(node)
    return sorted(known[function] for function in set(functions) if not function[2].startswith("<"))


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function, from `def` to its end, without the docstring."""
    text = ast.get_docstring(node, clean=False)
    return int(node.end_lineno or 0) - node.lineno + 1 - (0 if text is None else len(text.splitlines()))


def statements(tree: ast.AST) -> int:
    """Count the statements in a syntax tree, except docstrings and imports."""
    docstrings = {
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None
    }
    counted = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node not in docstrings)
    return sum(not isinstance(node, (ast.Import, ast.ImportFrom)) for node in counted)


def docstrings(tree: ast.AST) -> list[str]:
    """List the docstrings of a module, its classes and its functions."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names without a leading underscore that a module defines at its top level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        bound = [
            name.id
            for target in targets
            if target
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
        defined = [node.name] if isinstance(node, (ast.ClassDef, *FUNCTIONS)) else bound
        yield from (name for name in defined if not name.startswith("_"))


def classes(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def catches(tree: ast.AST) -> Iterator[int]:
    """Yield the numbers of lines that may swallow exceptions: `except` clauses without `raise`, calls of `suppress`,
    and `__exit__` methods that may return True."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            found = not any(isinstance(inner, ast.Raise) for inner in own_nodes(node))
        elif isinstance(node, ast.Call):
            found = ast.unparse(node.func) in ("suppress", "contextlib.suppress")
        else:
            found = isinstance(node, FUNCTIONS) and node.name in ("__exit__", "__aexit__") and may_be_true(node)
        if found:
            yield node.lineno  # type: ignore[attr-defined]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all descendants of a syntax-tree node, except those inside nested functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.Lambda, *FUNCTIONS)):
            yield from own_nodes(child)


def may_be_true(function: ast.AST) -> bool:
    values = [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]
    return any(value is not None and not (isinstance(value, ast.Constant) and not value.value) for value in values)


# ----------------------------------------------------------------------------------------------------------- imports


def import_graph(trees: Mapping[str, ast.Module], package: str = "shardmuon") -> Graph:
    """Map each module to all modules that it imports. Imports inside functions, imports under TYPE_CHECKING, and calls
    of `import_module` count, too."""
    names = {file: ".".join([package, *Path(file).with_suffix("").parts]) for file in trees}
    names = {file: name.removesuffix(".__init__") for file, name in names.items()}
    modules = set(names.values())
    graph = {}
    for file, tree in trees.items():
        name = names[file]
        parent = name if file.endswith("__init__.py") else name.rpartition(".")[0]
        found = {nearest(target, modules) for node in ast.walk(tree) for target in imported(node, parent)}
        graph[name] = found - {name, ""}
    return graph


def imported(node: ast.AST, parent: str) -> Iterator[str]:
    """Yield the full names of the modules and objects that an import statement or a call of `import_module` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def nearest(name: str, modules: Collection[str]) -> str:
    """Return the module in `modules` that a full name denotes or belongs to, or "" if there is none."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Graph) -> list[list[str]]:
    """Find import cycles, that is, strongly connected components of the import graph with more than one module."""
    below = {module: reached(module, graph) for module in graph}
    found = {frozenset(other for other in below[module] if module in below[other]) for module in graph}
    return sorted(sorted(component) for component in found if len(component) > 1)


def reached(module: str, graph: Graph) -> set[str]:
    """Return all modules that a module imports, directly or indirectly. If the module is part of an import cycle, the
    result contains the module itself."""
    found: set[str] = set()
    ahead = list(graph[module])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def climbing(graph: Graph, layers: Sequence[str]) -> list[str]:
    """List the modules that import from a layer above or beside their own. The package's `__init__.py` belongs to no
    layer, so imports by it and from it are ignored."""
    level = {name.strip(): at for at, line in enumerate(layers) for name in line.split("|")}

    def layer(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    def climbs(module: str, target: str) -> bool:
        mine, other = layer(module), layer(target)
        return bool(mine and other) and mine != other and level[other] <= level[mine]

    return sorted(module for module in graph if any(climbs(module, target) for target in graph[module]))


def layers_of_contract() -> list[str]:
    """Read the layers of the import-linter contract in pyproject.toml, from the highest to the lowest."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    found: list[str] = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    return found


# ------------------------------------------------------------------------------------------------- time and messages


def host_time(num_matrices: int, num_vectors: int) -> float:
    """Measure the processor time of a step, divided by the total time of torch.optim.Muon and torch.optim.AdamW on
    tensors of the same shapes. Return the median of five measurements.

    The tensors are so small that arithmetic takes hardly any time, so it does not matter that torch's Muon multiplies
    in bf16.
    """
    import torch
    from overhead import parameters, time_in_turn
    from torch import nn

    def vectors() -> list[nn.Parameter]:
        found = [nn.Parameter(filled(16)) for _ in range(num_vectors)]
        for p in found:
            p.grad = filled(16)
        return found

    def ratio() -> float:
        theirs = torch.optim.Muon(parameters(num_matrices), lr=0.01), torch.optim.AdamW(vectors(), lr=0.01)
        ours = muon_step(parameters(num_matrices), vectors())
        calls = {"ours": ours, "torch's": lambda: [one.step() for one in theirs]}
        # The time of other programs does not count as processor time.
        times = time_in_turn(calls, rounds=20, clock=time.process_time)
        return statistics.median(a / b for a, b in zip(*times.values(), strict=True))

    torch.set_num_threads(1)
    return statistics.median(ratio() for _ in range(5))


def vote_time() -> str:
    """Time a vote, in which eight ranks agree to start a step. Return its time divided by that of an all-reduce."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", "benchmarks/vote_time.py"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise, gloo looks up the host name, which may fail
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
        try:
            out, _ = run.communicate(timeout=100)
        except BaseException:
            run.terminate()  # unlike `kill`, this lets torchrun stop its ranks
            raise
    found = re.search(r"median of ratios ([\d.]+)", out)
    if run.returncode or found is None:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {run.returncode} and printed {out!r}")
    return found[1]


def unevenness(mesh: tuple[int, ...], ways: Sequence[Sequence[Any]], num: int) -> float:
    """Compute the largest number of bytes that any rank sends in a step, divided by the mean over all ranks. The
    placements in `ways` are assigned to the `num` matrices in turn."""
    from simulated import spec

    from shardmuon.layout.mesh import OnMesh
    from shardmuon.layout.pieces import ParamLayout
    from shardmuon.layout.views import matrix_view
    from shardmuon.plan.plan import Policy
    from shardmuon.plan.planner import make_plan

    view, ranks = matrix_view((16, 32)), tuple(range(math.prod(mesh)))
    readings = [OnMesh(mesh, ranks, tuple(placements)).reading(view.shape) for placements in ways]
    layouts = [ParamLayout(view, ranks, tuple(held for held, _ in found.values())) for found in readings]
    plan = make_plan([spec(f"p{i}", layouts[i % len(layouts)]) for i in range(num)], Policy())
    sent = [sum(bytes_sent(plan, bucket, rank) for bucket in plan.buckets if rank in bucket.ranks) for rank in ranks]
    return max(sent) / statistics.mean(sent)


def bytes_sent(plan: Any, bucket: Any, rank: int) -> int:
    """Count the bytes that a rank sends for a bucket (a group of matrices): parts of matrices to the ranks that
    orthogonalize them, results back to the ranks that store the parts, and results to other replicas."""
    from shardmuon.plan.program import Program

    program = Program.of(plan, bucket, rank)
    relayed = program.relay.sent if program.relay is not None else ()
    elements: int = sum(program.gather.sent) + sum(program.scatter.sent) + sum(relayed)
    return elements * int(bucket.itemsize)


# -------------------------------------------------------------------------------------------------------------- rows


def row_plain() -> str:
    return f"{plain_step()}, {plain_step().num_c}"


def row_lines() -> str:
    found = lengths([*plain_step().of_function, *sharded_step().of_function], sources())
    return f"{statistics.median(found):g} / {found[math.ceil(0.9 * len(found)) - 1]} / {found[-1]}"


def row_statements() -> str:
    counts = {file: statements(tree) for file, tree in sources().items()}
    core = sum(count for file, count in counts.items() if not file.startswith(APART))
    return f"{core:,} (all: {sum(counts.values()):,})"


def places() -> list[str]:
    """List all lines that may swallow exceptions, as "file:line"."""
    return [f"src/shardmuon/{file}:{line}" for file, tree in sources().items() for line in sorted(catches(tree))]


def row_catches() -> str:
    apart = tuple(f"src/shardmuon/{folder}" for folder in APART)
    return f"{len(places())} ({sum(not place.startswith(apart) for place in places())} in what row 4 counts)"


def row_kept() -> str:
    from kept_in_source import kept_in_source

    return str(len(kept_in_source()))


def row_imports() -> str:
    graph = import_graph(sources())
    return f"{len(circles(graph))} / {len(climbing(graph, layers_of_contract()))}"


def row_host_time() -> str:
    return f"{host_time(48, 50):.2f} / {host_time(600, 120):.2f}"


def row_bytes() -> str:
    from shardmuon.layout.mesh import Shard

    hsdp = [(None, Shard(0))]
    # placements of column-parallel and row-parallel weights
    by_columns, by_rows = (None, Shard(0, 2), Shard(0)), (None, Shard(0), Shard(1))
    jobs: dict[str, tuple[tuple[int, ...], list[Any]]] = {
        "2x4": ((2, 4), hsdp),
        "4x2": ((4, 2), hsdp),
        "2x2xTP2": ((2, 2, 2), [by_columns, by_rows]),
    }
    found = {name: [unevenness(*job, num) for num in (60, 7, 3)] for name, job in jobs.items()}
    return "; ".join(f"{name} " + " / ".join(f"{ratio:.2f}" for ratio in of_job) for name, of_job in found.items())


def satellites() -> list[ast.Module]:
    """Return the syntax trees of shardmuon and of its satellite packages, such as shardmuon_qkclip."""
    return list(sources(ROOT / "src").values())


def row_all_statements() -> str:
    of_tests = sources(ROOT / "tests").values()
    return f"{sum(map(statements, satellites())):,} / {sum(map(statements, of_tests)):,}"


def row_names() -> str:
    defined = Counter(name for tree in satellites() for name in classes(tree))
    return f"{sum(1 for tree in satellites() for _ in public_names(tree))} / {sum(n > 1 for n in defined.values())}"


def row_docstrings() -> str:
    found = [BAD_OPENING.match(text) is not None for tree in satellites() for text in docstrings(tree)]
    return f"{sum(found) / len(found):.1%}"


def row_import() -> str:
    """Measure the processor time of `import shardmuon` after `import torch`. Return the median over five processes."""
    code = "import time, torch; began = time.process_time(); import shardmuon; print(time.process_time() - began)"
    with tempfile.TemporaryDirectory() as cache:
        # Only the first process compiles bytecode, so the median does not include compilation.
        written = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        environment = {**os.environ, **written, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", code]
        runs = [subprocess.run(command, env=environment, capture_output=True, check=True) for _ in range(5)]
    return f"{statistics.median(float(run.stdout) for run in runs):.2f} s"


class Row(NamedTuple):
    """One row of the table: its name, its target, and a function that measures its value."""

    name: str
    bar: str
    measure: Callable[[], str]


ROWS = {
    1: Row("plain step: calls / functions / files, C calls", "80 / 50 / 10, 160", row_plain),
    2: Row("step of an FSDP2 rank: calls / functions / files", "110 / 65 / 12", lambda: str(sharded_step())),
    3: Row("lines of the functions of 1 and 2: median / p90 / longest", "15 / 40 / 60", row_lines),
    4: Row("statements without price, foresight, audit, testing, QK-clip, commands", "6,000", row_statements),
    5: Row("places that catch and do not raise", "12", row_catches),
    6: Row("caches and weak maps of a process", "12", row_kept),
    7: Row("circles of imports / files with an import not from below", "0 / 0", row_imports),
    8: Row("host time over torch's Muon + AdamW: 48 + 50 / 600 + 120 tensors", "0.38 / 0.19", row_host_time),
    9: Row("time of a vote over an all-reduce, 8 gloo ranks", "0.4", vote_time),
    10: Row("bytes sent by a rank, largest over mean: 60 / 7 / 3 matrices", "1.05 / 1.25 / 1.25", row_bytes),
    11: Row("statements of src with satellites / of tests", "9,500 / 11,000", row_all_statements),
    12: Row("public names of modules / class names defined twice", "300 / 0", row_names),
    13: Row("docstrings that open with a question word, preposition, pronoun", "2.0%", row_docstrings),
    14: Row("import after torch's", "0.08 s", row_import),
}


def measure(numbers: Iterable[int]) -> tuple[list[tuple[str, str, str]], list[int]]:
    """Measure the given rows. Return the lines of the table, and the numbers of the rows that failed."""
    lines, failed = [("row", "measured", "bar")], []
    for number in numbers:
        row = ROWS[number]
        try:
            measured = row.measure()
        except Exception as error:
            traceback.print_exc()
            measured = f"failed: {type(error).__name__}"
            failed.append(number)
        lines.append((f"{number:2} {row.name}", measured, row.bar))
    return lines, failed


def table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(" | ".join(line).rstrip() for line in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--list", action="store_true", help="also list file:line of row 5")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests", "benchmarks")]
    lines, failed = measure(args.only)
    print(table(lines))
    if args.list:
        print("", *places(), sep="\n")
    if failed:
        sys.exit(f"failed: row {', row '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
