"""What Muon will take of a job before it runs: the real plan of any model on any mesh, counted without ranks."""

from __future__ import annotations

from shardmuon.foresight.types import BucketCount, Exact, Matrices, MatrixKind, Mesh, RankClass, Sent, Stored

__all__ = ["BucketCount", "Exact", "Matrices", "MatrixKind", "Mesh", "RankClass", "Sent", "Stored"]
