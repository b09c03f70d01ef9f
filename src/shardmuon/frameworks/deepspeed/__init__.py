"""DeepSpeed: what an optimizer needs to be given to `deepspeed.initialize`.

ZeRO's partitions and swap files are in partitions.py, the step on them and checkpoints in host.py.
"""

from shardmuon.frameworks.deepspeed.host import load_checkpoint as load_checkpoint

# Settings that DeepSpeed asks for where an optimizer is not its own.
REQUIRED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
