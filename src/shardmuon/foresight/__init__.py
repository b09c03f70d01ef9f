"""Cost of Muon in a job, before the job runs: the real plan of any model on any mesh, without ranks, and its price."""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.hardware import load as load_hardware
from shardmuon.foresight.job import count
from shardmuon.foresight.pricing import price_plan
from shardmuon.foresight.report import Report, plan

__all__ = ["Hardware", "Report", "count", "load_hardware", "plan", "price_plan"]
