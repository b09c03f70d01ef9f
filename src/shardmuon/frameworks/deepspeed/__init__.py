"""DeepSpeed: configuration and checkpoints for a `Muon` that is passed to `deepspeed.initialize`.

partitions.py handles ZeRO's partitions and swap files; host.py handles steps on partitions, and checkpoints.
"""

from shardmuon.frameworks.deepspeed.host import load_checkpoint as load_checkpoint

# Settings that DeepSpeed's config needs for an optimizer that DeepSpeed does not know.
REQUIRED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
