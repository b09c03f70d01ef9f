"""Muon optimizer for PyTorch that computes the same update, bit for bit, however the weights are sharded."""

# importing `frameworks` registers the adapters for the supported frameworks
from shardmuon import frameworks as frameworks
from shardmuon.auditing import AuditError as AuditError
from shardmuon.auditing import AuditWarning as AuditWarning
from shardmuon.auditing import audit as audit
from shardmuon.errors import ExchangeError as ExchangeError
from shardmuon.gradients.clip import clip_grad_norm_ as clip_grad_norm_
from shardmuon.gradients.scaler import GradScaler as GradScaler
from shardmuon.muon import Muon as Muon
from shardmuon.orthogonalize.schedules import schedule as schedule
from shardmuon.routing.groups import param_groups as param_groups

__version__ = "0.1.0"
