"""Checkpoints: whole jobs on any layout, state dicts and their vetting, other Muons' state.

May import stepping and what that may. Users import this package: `from shardmuon import checkpoint`.
"""

from shardmuon.checkpoint.foreign import FORMATS as FORMATS
from shardmuon.checkpoint.foreign import Report as Report
from shardmuon.checkpoint.foreign import load_foreign as load_foreign
from shardmuon.checkpoint.foreign import merge_ranks as merge_ranks
from shardmuon.checkpoint.saving import load as load
from shardmuon.checkpoint.saving import save as save
from shardmuon.checkpoint.saving import to_torch_muon as to_torch_muon
