"""QK-clip: bound attention logits by scaling the rows of query and key weights, with any sharding."""

from shardmuon_qkclip.clip import LogitReport, QKClip
from shardmuon_qkclip.layers import Attention, Rows
from shardmuon_qkclip.scaling import LayerLogits

__all__ = ["Attention", "LayerLogits", "LogitReport", "QKClip", "Rows"]
