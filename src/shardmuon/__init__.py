"""One Muon optimizer for PyTorch: the same update, bit for bit, however the weights are sharded."""

from shardmuon.auditing import Audit as Audit
from shardmuon.auditing import AuditError as AuditError
from shardmuon.auditing import AuditWarning as AuditWarning
from shardmuon.auditing import audit as audit
from shardmuon.groups import ParamGroups as ParamGroups
from shardmuon.groups import RoutingRow as RoutingRow
from shardmuon.groups import param_groups as param_groups
from shardmuon.muon import Muon as Muon

__version__ = "0.1.0"
