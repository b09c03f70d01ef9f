"""A helper that runs a script in a separate OS process for each rank. These processes exit normally, unlike the ranks
of a `RankPool`, which exit through `os._exit`. All ranks are forked by one process that has already imported torch."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_FORKS = """
import json, os, sys
import torch, torch._dynamo, torch.distributed, torch.distributed.fsdp, torch.distributed.tensor, pytest
import shardmuon, shardmuon.testing.layouts

def is_rank(folder, world, script, arguments):
    ranks = []
    for rank in range(world):
        process = os.fork()
        if not process:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
            sys.argv = [script, str(rank), *arguments]
            return True
        ranks.append(process)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]), flush=True)
    return False

while asked := sys.stdin.readline():
    if is_rank(*json.loads(asked)):
        exec(compile(sys.argv[0], "script", "exec"), {"__name__": "__main__"})
        break
"""
# The process that forks the ranks, as the only element of a list. The list is empty until that process has started.
_parent: list[subprocess.Popen[str]] = []


def run_to_the_end(script: str, world: int, folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Run the code in `script` in a separate process for each rank, with the rank and the arguments in `sys.argv[1:]`.
    Return the exit code, stdout and stderr of each rank."""
    if not _parent:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **paths}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _parent.append(subprocess.Popen([sys.executable, "-c", _FORKS], env=env, **pipes, start_new_session=True))
        atexit.register(_end)
    (parent,) = _parent
    assert parent.stdin is not None and parent.stdout is not None
    try:
        parent.stdin.write(json.dumps([str(folder), world, script, arguments]) + "\n")
        parent.stdin.flush()
        assert select.select([parent.stdout], [], [], 120)[0], "the ranks did not end in time"
        codes = json.loads(parent.stdout.readline())
    except BaseException:
        _end()
        raise
    outputs = [((folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text()) for rank in range(world)]
    return [(code, *output) for code, output in zip(codes, outputs, strict=True)]


def _end() -> None:
    """Kill the process that forks ranks, and all ranks."""
    while _parent:
        parent = _parent.pop()
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        for pipe in (parent.stdin, parent.stdout):
            if pipe is not None:
                pipe.close()
