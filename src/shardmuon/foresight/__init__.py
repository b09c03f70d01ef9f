"""What Muon will take of a job before it runs: the real plan of any model on any mesh, counted without ranks."""

from __future__ import annotations

from shardmuon.foresight.job import Setting, count
from shardmuon.foresight.meshes import parse_mesh
from shardmuon.foresight.models import preset_names
from shardmuon.foresight.saving import load, save
from shardmuon.foresight.types import BucketCount, Exact, Matrices, MatrixKind, Mesh, RankClass, Sent, Stored

__all__ = [
    "BucketCount",
    "Exact",
    "Matrices",
    "MatrixKind",
    "Mesh",
    "RankClass",
    "Sent",
    "Setting",
    "Stored",
    "count",
    "load",
    "parse_mesh",
    "preset_names",
    "save",
]
