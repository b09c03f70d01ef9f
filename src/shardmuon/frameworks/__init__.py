"""Integrations with frameworks that call the optimizer or store its parameters, one file per framework.

This file registers the integrations that are found automatically. Integrations must not import `commands` and
`testing`, and lower layers must not import integrations.
"""

from shardmuon.frameworks.deepspeed import DeepSpeedEngine, DeepSpeedHost
from shardmuon.frameworks.fsdp1 import FSDP1Host
from shardmuon.frameworks.megatron_fsdp import MegatronFSDPCopy, MegatronFSDPEngine, MegatronFSDPHost
from shardmuon.host import register as register_host
from shardmuon.layout.engines import register as register_engine

for engine in (DeepSpeedEngine(), MegatronFSDPEngine(), MegatronFSDPCopy()):
    register_engine(engine)
for host in (DeepSpeedHost, MegatronFSDPHost, FSDP1Host):
    register_host(host)
