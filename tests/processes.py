"""Ranks that are whole processes and end as a process does, with interpreter and libraries torn down.

Ranks of a `RankPool` leave by `os._exit`. These are forked by one process that has imported torch, so that it is
imported once, and then run a script to its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_FORKS = """
import json, os, sys
import torch, torch._dynamo, torch.distributed, torch.distributed.tensor
import shardmuon

folder, world, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ranks = []
for rank in range(world):
    process = os.fork()
    if not process:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [script, str(rank), *sys.argv[4:]]
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        break
    ranks.append(process)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]))
"""


def run_to_the_end(script: str, world: int, folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Of each rank the exit code and what it wrote to both outputs; `sys.argv` is its number and the arguments."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _FORKS, str(folder), str(world), script, *arguments]
    parent = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = parent.communicate(timeout=120)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)  # the ranks, too
    assert parent.returncode == 0, err
    codes = json.loads(out)
    outputs = [((folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text()) for rank in range(world)]
    return [(code, *output) for code, output in zip(codes, outputs, strict=True)]
