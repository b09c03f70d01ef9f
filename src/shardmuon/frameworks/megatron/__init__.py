"""Megatron: its optimizers (`training`, `buffers`), the host that steps their shards, and Megatron-FSDP (`fsdp`).
Imported by nothing below.
"""
