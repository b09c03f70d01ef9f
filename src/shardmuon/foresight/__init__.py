"""Estimate the cost of Muon in a training job before the job runs.

`plan` makes the plan that the job itself would make, for any model on any mesh, without starting ranks. From this plan,
it estimates the time, memory and communication of an optimizer step.
"""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.job import count
from shardmuon.foresight.report import Report, plan, price_plan

__all__ = ["Hardware", "Report", "count", "plan", "price_plan"]
