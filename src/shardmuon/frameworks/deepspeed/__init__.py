"""DeepSpeed: configuration and checkpoints for a `Muon` that is passed to `deepspeed.initialize`.

ZeRO's partitions and swap files are in partitions.py; the step on partitions, and checkpoints, are in host.py.
"""

from shardmuon.frameworks.deepspeed.host import load_checkpoint as load_checkpoint

# Settings that DeepSpeed's config needs for an optimizer that is not DeepSpeed's own.
REQUIRED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
