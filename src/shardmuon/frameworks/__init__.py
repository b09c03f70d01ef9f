"""Integrations with frameworks that call the optimizer or store its parameters, one file per framework.

Importing this package registers the integrations with DeepSpeed, FSDP1 and Megatron-FSDP. Users import the other
integrations explicitly. Integrations must not import `commands` or `testing`, and lower layers must not import
integrations.
"""

from shardmuon.frameworks import deepspeed as deepspeed
from shardmuon.frameworks import fsdp1 as fsdp1
from shardmuon.frameworks import megatron_fsdp as megatron_fsdp
