"""DeepSpeed: ZeRO's partitions and swap files (`partitions`, `nvme`), the host that steps them, config, checkpoints.

Imported by nothing below. Users import this package.
"""

from shardmuon.frameworks.deepspeed.config import expert_groups as expert_groups
from shardmuon.frameworks.deepspeed.config import from_config as from_config
from shardmuon.frameworks.deepspeed.resume import load_checkpoint as load_checkpoint
