"""DeepSpeed: ZeRO's partitions and swap files (`partitions`, `nvme`), the host that steps them, config, checkpoints.

Imported by nothing below.
"""
