"""Estimate the cost of Muon in a training job before the job runs.

`plan` makes the plan that the job itself would make, for any model on any mesh, without starting ranks. It then
estimates the time, memory and communication of a step.
"""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.hardware import load as load_hardware
from shardmuon.foresight.job import count
from shardmuon.foresight.pricing import price_plan
from shardmuon.foresight.report import Report, plan

__all__ = ["Hardware", "Report", "count", "load_hardware", "plan", "price_plan"]
