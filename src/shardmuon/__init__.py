"""One Muon optimizer for PyTorch: the same update, bit for bit, however the weights are sharded."""

from shardmuon.muon import Muon as Muon

__version__ = "0.1.0"
