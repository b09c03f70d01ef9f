"""Estimate the cost of Muon in a training job before the job runs.

`plan` computes the plan that the job itself would use, for any model on any mesh and without starting ranks. From this
plan, it estimates the time, memory and communication of an optimizer step.
"""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.job import Exact
from shardmuon.foresight.report import Price, Report, plan

__all__ = ["Exact", "Hardware", "Price", "Report", "plan"]
