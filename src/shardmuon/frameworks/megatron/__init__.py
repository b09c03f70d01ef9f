"""Megatron: its optimizers (`training`, `buffers`), the host that steps their shards, and Megatron-FSDP (`fsdp`).

Imported by nothing below. Users import this package.
"""

from shardmuon.frameworks.megatron.training import get_megatron_optimizer as get_megatron_optimizer
