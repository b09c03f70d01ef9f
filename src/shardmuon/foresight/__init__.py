"""The cost of Muon in a job before it runs: the real plan of any model on any mesh, without ranks, and its price."""

from __future__ import annotations

from shardmuon.foresight.front import plan
from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.hardware_files import load as load_hardware
from shardmuon.foresight.hardware_files import names as hardware_names
from shardmuon.foresight.job import Setting, count
from shardmuon.foresight.live import price_plan
from shardmuon.foresight.meshes import parse_mesh
from shardmuon.foresight.models import preset_names
from shardmuon.foresight.pricing import Price, price
from shardmuon.foresight.report import Report
from shardmuon.foresight.types import BucketCount, Exact, Matrices, MatrixKind, Mesh, RankClass, Sent, Stored

__all__ = [
    "BucketCount",
    "Exact",
    "Hardware",
    "Matrices",
    "MatrixKind",
    "Mesh",
    "Price",
    "RankClass",
    "Report",
    "Sent",
    "Setting",
    "Stored",
    "count",
    "hardware_names",
    "load_hardware",
    "parse_mesh",
    "plan",
    "preset_names",
    "price",
    "price_plan",
]
