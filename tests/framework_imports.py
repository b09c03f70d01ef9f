"""Imports of all installed frameworks. The process that forks the ranks of framework tests imports this module, so that
the ranks inherit the imports."""

from __future__ import annotations

import importlib.util

from deepspeed_job import import_deepspeed
from megatron_gpt import FOUND, import_megatron, import_megatron_fsdp

if importlib.util.find_spec("deepspeed"):
    import_deepspeed()
if importlib.util.find_spec("megatron_fsdp"):
    import_megatron_fsdp()
if FOUND:
    import_megatron()
