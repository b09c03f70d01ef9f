"""FSDP1 with `use_orig_params=False`, and the state that `FSDP.optim_state_dict` reads (docs/layouts.md).

Importing it does not import torch.distributed.fsdp.
"""

from shardmuon.frameworks.fsdp1.host import named_parameters

__all__ = ["named_parameters"]
