"""Plant faults in the core, one at a time, and see which of them the tests find.

    python scripts/mutants.py [--number 60] [--seed 0] [--only 3 17]     # resumes where it stopped
    python scripts/mutants.py --list                                    # lists the mutants without running tests
    python scripts/mutants.py --equivalent 17 "reason"                  # marks a survivor that changes no behaviour

A mutant is one change to the syntax tree of a file in one of the core's folders (`FOLDERS`). The script makes the
change in a copy of the project, and runs the tests that may detect it until one of them fails. These are the tests in
`FIRST` and `ANYWHERE`, tests that mention the mutated code or a name that its module defines, and the tests of its
folder. A test that fails for the first time is also run without the mutant; if it fails again, all later runs leave it
out. A test that hangs fails after its time-out. If a mutant's tests do not end within `TIMEOUT`, the mutant is
"unfinished" and is not counted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "src" / "shardmuon"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
FOLDERS = ("layout", "plan", "step", "momentum", "comm", "gradients")
FIRST = ("step/test_steps", "golden/test_golden")
# tests to leave out, because they take minutes or need special environments, and other tests detect the same faults
SLOW = ("test_gpu", "frameworks/test_demo", "site", "stack", "zoo")
ANYWHERE = ("step/test_equality", "step/test_all_or_nothing", "variants/test_variants_layouts")  # run for every mutant
MOST_NAMING = 5  # at most this many of the test files that mention the mutated code are run
TIMEOUT = 1800  # time limit in seconds for all tests of a mutant
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass
class Mutant:
    """One change to the source code.

    Attributes:
        number: Index of the mutant in the list that `draw` returns.
        file, line: Location of the change.
        kind: Kind of the change, such as "swapped arguments".
        before, after: Source text that is replaced, and its replacement.
        span: Start and end of the replaced text, as byte offsets in the file.
    """

    number: int
    file: str
    line: int
    kind: str
    before: str
    after: str
    span: tuple[int, int]


Change = tuple[str, ast.AST]  # kind of change, and the node that replaces the original


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield all changes that can be made to a node of a syntax tree."""
    if isinstance(node, ast.Compare):
        yield "comparison", _with(node, lambda new: new.ops.__setitem__(0, COMPARISONS[type(new.ops[0])]()))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", _with(node, lambda new: setattr(new, "op", other))
        yield "dropped operand", node.values[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "removed not", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
        yield "operator", _with(node, lambda new: setattr(new, "op", OPERATORS[type(new.op)]()))
        if not isinstance(node.op, (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)):
            yield "swapped operands", ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        yield "constant + 1", ast.Constant(node.value + 1)
        yield "constant - 1", ast.Constant(node.value - 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "negated constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield "swapped arguments", _with(node, lambda new: new.args.insert(0, new.args.pop(1)))
    elif isinstance(node, ast.Slice) and node.lower is not None and node.upper is not None:
        yield "open slice", ast.Slice(node.lower, None, node.step)
        yield "slice from the start", ast.Slice(None, node.upper, node.step)
    elif isinstance(node, ast.IfExp):
        yield "swapped branches", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        yield "dropped statement", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", ast.Return(ast.Constant(None))


def _with(node: Any, change: Callable[[Any], object]) -> ast.AST:
    new = copy.deepcopy(node)
    change(new)
    return new  # type: ignore[no-any-return]


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yield the syntax-tree nodes in function bodies, except those in docstrings, annotations, parameter lists,
    assertions, f-strings, and yield and raise statements. A raise statement itself is included."""
    for child in ast.iter_child_nodes(tree):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        text = isinstance(child, ast.Expr) and isinstance(child.value, (ast.Constant, ast.Yield, ast.YieldFrom))
        if text or isinstance(child, (ast.JoinedStr, ast.arguments, ast.Assert)):
            continue
        if inside and not is_function:
            yield child
        if isinstance(child, ast.AnnAssign):
            if inside and child.value is not None:
                yield child.value
                yield from nodes(child.value, True)
            continue
        # A raise statement can only be dropped as a whole, because tests need not check error messages.
        if isinstance(child, ast.Raise):
            continue
        if is_function:
            for statement in child.body:  # type: ignore[attr-defined]
                yield from nodes(ast.Module([statement], []), True)
        else:
            yield from nodes(child, inside)


def sites(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file. `draw` numbers them later."""
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data = source.encode()
    for node in nodes(ast.parse(source)):
        if not hasattr(node, "lineno"):
            continue
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = data[slice(*span)].decode()
        for kind, new in changes(node):
            after = ast.unparse(ast.fix_missing_locations(new))
            after = f"({after})" if isinstance(new, (ast.BinOp, ast.BoolOp, ast.IfExp, ast.Compare)) else after
            yield Mutant(-1, str(path.relative_to(ROOT)), node.lineno, kind, before, after, span)


def is_change(mutant: Mutant) -> bool:
    """True if the mutated file can be parsed and its syntax tree differs from the original."""
    data = (ROOT / mutant.file).read_bytes()
    try:
        mutated = ast.parse(data[: mutant.span[0]] + mutant.after.encode() + data[mutant.span[1] :])
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse(data))


def draw(number: int, seed: int) -> list[Mutant]:
    """Draw `number` mutants at random. Each draw first chooses a kind of change, with equal probabilities for all kinds
    that have mutants left, and then a mutant of this kind."""
    chance = random.Random(seed)
    files = [path for folder in FOLDERS for path in sorted((CORE / folder).rglob("*.py"))]
    by_kind: dict[str, list[Mutant]] = {}
    for path in files:
        for mutant in sites(path):
            by_kind.setdefault(mutant.kind, []).append(mutant)
    found = []
    while len(found) < number:
        kind = chance.choice(sorted(kind for kind, left in by_kind.items() if left))
        mutant = by_kind[kind].pop(chance.randrange(len(by_kind[kind])))
        if is_change(mutant):
            mutant.number = len(found)
            found.append(mutant)
    return found


def tests_for(mutant: Mutant) -> list[str]:
    """List the test files that may detect a mutant, in the order in which they run."""
    place = (ROOT / mutant.file).relative_to(CORE).with_suffix("").parts
    folder, module = place[0], ".".join(["shardmuon", *place])
    tree = ast.parse((ROOT / mutant.file).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined = {node.name for node in functions}
    around = {node.name for node in functions if node.lineno <= mutant.line <= (node.end_lineno or 0)}
    words = re.findall(r"[A-Za-z_]{6,}", mutant.before)
    # Words in lower case without underscores are ignored, because they are too common.
    changed = {*(word for word in words if "_" in word or word != word.lower()), *around}

    def count(words: set[str], text: str) -> int:
        known = [re.escape(word) for word in words if len(word) > 5 and not word.startswith("_")]
        return len(re.findall(rf"\b(?:{'|'.join(known)})\b", text)) if known else 0

    tests = ROOT / "tests"
    files = {path.relative_to(tests).with_suffix("").as_posix(): path for path in sorted(tests.rglob("test_*.py"))}
    texts = {name: path.read_text() for name, path in files.items() if not {name, name.partition("/")[0]} & {*SLOW}}
    scores = {name: (count(changed, text), count({module, *defined}, text)) for name, text in texts.items()}
    naming = sorted((name for name, score in scores.items() if any(score)), key=lambda name: scores[name], reverse=True)
    own = [name for name in files if name.startswith(f"{folder}/")]
    chosen = [*FIRST, *naming[:MOST_NAMING], *own, *ANYWHERE]
    # If a test file were missing, pytest would fail and the mutant would count as killed.
    if gone := [name for name in chosen if name not in files]:
        raise SystemExit(f"mutants.py names tests that are not there: {', '.join(gone)}")
    return list(dict.fromkeys(chosen))


def run_tests(tree: Path, tests: list[str], timeout: float) -> tuple[int, str]:
    """Run tests; return the exit status (124 for a time-out) and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return 124, "time-out"
            except BaseException:
                os.killpg(process.pid, 9)
                raise
        log.seek(0)
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read(), re.MULTILINE)
    return code, found.group(1) if found else ""


def judge(mutant: Mutant, fine: set[str], broken: list[str]) -> dict[str, Any]:
    """Run the tests on a mutant, and return the mutant's entry in the results file. A failed test that is
    not in `fine` runs again without the mutant. If it passes, it is added to `fine`, otherwise to `broken`."""
    started = time.monotonic()
    tests = [f"tests/{name}.py" for name in tests_for(mutant)]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        skipped = shutil.ignore_patterns("__pycache__", ".*")
        for name in ("src", "tests", "examples", "docs", "benchmarks", "scripts"):
            shutil.copytree(ROOT / name, tree / name, ignore=skipped)
        for path in (path for path in ROOT.iterdir() if path.is_file()):
            shutil.copy(path, tree / path.name)
        data = (ROOT / mutant.file).read_bytes()
        mutated = data[: mutant.span[0]] + mutant.after.encode() + data[mutant.span[1] :]
        while True:
            (tree / mutant.file).write_bytes(mutated)
            deselected = [part for test in broken for part in ("--deselect", test)]
            code, test = run_tests(tree, [*tests, *deselected], TIMEOUT)
            if code in (0, 124) or "::" not in test or test.partition("[")[0] in fine:
                break
            (tree / mutant.file).write_bytes(data)
            if run_tests(tree, [test], TIMEOUT)[0] == 0:
                fine.add(test.partition("[")[0])
                break
            print(f"{test} fails without a mutant, too", file=sys.stderr)
            broken.append(test.partition("[")[0])
    outcome = {0: "survived", 124: "unfinished"}.get(code, "killed")
    seconds = round(time.monotonic() - started)
    return {**asdict(mutant), "outcome": outcome, "by": test, "tests": tests, "seconds": seconds}


def key_of(mutant: dict[str, Any]) -> tuple[object, ...]:
    """Return the fields that identify a mutant. Mutants with equal fields are the same change to the same source."""
    return tuple(
        mutant[key] if key != "span" else tuple(mutant[key]) for key in ("file", "kind", "before", "after", "span")
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Summarize in one line how many of the mutants were killed, and how many are marked as equivalent."""
    equivalent = [row for row in rows if row.get("equivalent")]
    killed = [row for row in rows if row["outcome"] == "killed"]
    count = sum(row["outcome"] != "unfinished" for row in rows) - len(equivalent)
    rate = f"{100 * len(killed) / count:.0f} %" if count else "none"
    return f"{len(killed)} of {count} killed ({rate}), {len(equivalent)} more are equivalent"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="these numbers only, whether or not they have run")
    parser.add_argument("--list", action="store_true", help="print what is drawn")
    parser.add_argument("--equivalent", nargs=2, metavar=("NUMBER", "REASON"), help="mark a survivor")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else []
    if args.equivalent:
        (row,) = (row for row in rows if row["number"] == int(args.equivalent[0]) and row["outcome"] == "survived")
        row["equivalent"] = args.equivalent[1]
        _write(rows, args)
        return 0
    mutants = draw(args.number, args.seed)
    known = {key_of(row): row for row in rows if row["outcome"] != "unfinished"}
    broken: list[str] = []
    fine = {row["by"].partition("[")[0] for row in rows if row["outcome"] == "killed"}
    rows = [known[key] | {"number": m.number} for m in mutants if (key := key_of(asdict(m))) in known]
    for mutant in mutants:
        text = f"{mutant.number:2} {mutant.file}:{mutant.line} {mutant.kind}: {mutant.before!r} -> {mutant.after!r}"
        if args.list:
            print(text)
            continue
        wanted = mutant.number in args.only if args.only else key_of(asdict(mutant)) not in known
        if not wanted:
            continue
        found = judge(mutant, fine, broken)
        rows = sorted([row for row in rows if row["number"] != mutant.number] + [found], key=lambda r: r["number"])
        _write(rows, args)
        print(f"{found['outcome']:8} {text} [{found['by']}, {found['seconds']} s]", flush=True)
    print(summary(rows))
    for row in rows:
        if row["outcome"] != "killed":
            print(f"{row['number']:2} {row['file']}:{row['line']}", row.get("equivalent", row["outcome"].upper()))
    return 0


def _write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    head = {"number": args.number, "seed": args.seed, "summary": summary(rows)}
    RESULTS.write_text(json.dumps({**head, "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
