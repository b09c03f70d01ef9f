"""Compare optimizer steps of the working tree, bit for bit, with those of another commit.

    python scripts/golden.py --base COMMIT [--ranks 1 2 3 4] [--only TEXT]

Golden rows are combinations of layout, options and dtype, defined in tests/golden. Both versions run the golden rows of
the *working tree*, one version after the other, on the same machine. Each version builds the layouts with its own code.
The script prints each row that differs, with the tensors that differ and the ranks on which they differ. The exit
status is 1 if any row differs, or if no row has run. The digests of COMMIT are kept in build/golden, so a second
comparison with the same commit takes half the time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "golden"
KEPT = ROOT / "build" / "golden"
TIMEOUT = 900  # time limit in seconds for running all rows with one number of ranks
MOST_TENSORS = 6  # maximum number of tensors to print for one row

Rows = Mapping[str, Mapping[str, list[str]]]  # row name -> tensor name -> one digest per rank


def commit_of(base: str) -> str:
    """Return the full hash of the commit that a git revision names."""
    command = ["git", "rev-parse", "--verify", f"{base}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def unpack(commit: str, folder: Path) -> Path:
    """Unpack the src folder of a commit into `folder`, and return `folder`."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def run(tree: Path, ranks: int, only: str, out: Path) -> Rows:
    """Run the golden rows (combinations of layout, options and dtype) with the code in the source tree `tree`. Return
    the digests of all tensors, keyed by row and then by tensor."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROWS.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "golden.rows", "--ranks", str(ranks), "--out", str(out), "--only", only]
    with subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(TIMEOUT)
        except BaseException:
            os.killpg(process.pid, 9)  # kills the ranks as well as `process`
            raise
    if code:
        sys.exit(f"golden rows on {ranks} ranks failed with {tree / 'src'} (exit status {code})")
    rows: Rows = json.loads(out.read_text())["rows"]
    print(f"  {len(rows)} rows in {time.monotonic() - started:.0f} s ({tree / 'src'})", flush=True)
    return rows


def kept_name(commit: str, ranks: int, only: str) -> Path:
    """Return the path of a commit's saved digests. The file name depends on everything else that determines the
    digests: the golden rows, the number of ranks, the machine, and the versions of torch and Python."""
    sources = b"".join(path.read_bytes() for path in sorted(ROWS.glob("*.py")))
    parts = (sources, importlib.metadata.version("torch"), platform.python_version(), platform.node(), only)
    return KEPT / f"{commit[:12]}-{ranks}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}.json"


def differences(here: Rows, base: Rows) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each row that differs between the two versions, with a list of lines of text: one for each
    tensor that differs."""
    for row in dict.fromkeys([*here, *base]):
        mine, theirs = here.get(row, {}), base.get(row, {})
        lines = []
        for tensor in dict.fromkeys([*mine, *theirs]):
            if mine.get(tensor) == theirs.get(tensor):
                continue
            if tensor not in mine or tensor not in theirs:
                lines.append(f"{tensor}: only in {'the working tree' if tensor in mine else 'the base'}")
            else:
                ranks = [i for i, (a, b) in enumerate(zip(mine[tensor], theirs[tensor], strict=True)) if a != b]
                lines.append(f"{tensor}: on ranks {ranks}")
        if lines:
            yield row, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit to compare the working tree with")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--only", default="", help="only rows whose names hold this text")
    parser.add_argument("--all", action="store_true", help="print every tensor that differs")
    args = parser.parse_args()
    commit = commit_of(args.base)
    num_rows, num_tensors, num_refused, num_different = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(commit, Path(folder))
        KEPT.mkdir(parents=True, exist_ok=True)
        for ranks in args.ranks:
            print(f"{ranks} rank{'s' * (ranks > 1)}", flush=True)
            kept = kept_name(commit, ranks, args.only)
            if kept.exists():
                base: Rows = json.loads(kept.read_text())["rows"]
                print(f"  {len(base)} rows of {commit[:12]} kept from before")
            else:
                base = run(tree, ranks, args.only, kept.with_suffix(".new"))
                kept.with_suffix(".new").rename(kept)
            here = run(ROOT, ranks, args.only, Path(folder, "here.json"))
            num_rows += len(here)
            num_tensors += sum(map(len, here.values()))
            num_refused += sum("refused" in row for row in here.values())
            for row, lines in differences(here, base):
                num_different += 1
                print(f"DIFFERS  {row}")
                shown = lines if args.all else lines[:MOST_TENSORS]
                print("".join(f"    {line}\n" for line in shown), end="")
                if len(lines) > len(shown):
                    print(f"    and {len(lines) - len(shown)} more")
    refused = f", {num_refused} refused" if num_refused else ""
    print(f"{num_different} of {num_rows} rows differ from {commit[:12]} ({num_tensors} tensors{refused})")
    return int(num_different > 0 or num_rows == 0)


if __name__ == "__main__":
    sys.exit(main())
