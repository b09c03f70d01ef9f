"""One Muon optimizer for PyTorch: the same update, bit for bit, however the weights are sharded."""

from shardmuon.auditing import Audit as Audit
from shardmuon.auditing import AuditError as AuditError
from shardmuon.auditing import AuditWarning as AuditWarning
from shardmuon.auditing import audit as audit
from shardmuon.clip import clip_grad_norm_ as clip_grad_norm_
from shardmuon.errors import ExchangeError as ExchangeError
from shardmuon.groups import ParamGroups as ParamGroups
from shardmuon.groups import RoutingRow as RoutingRow
from shardmuon.groups import param_groups as param_groups
from shardmuon.muon import Muon as Muon
from shardmuon.orthogonalize.schedules import Schedule as Schedule
from shardmuon.orthogonalize.schedules import schedule as schedule
from shardmuon.scaler import GradScaler as GradScaler

__version__ = "0.1.0"
