"""Estimate the cost of Muon in a training job before the job runs.

The function `plan` computes the plan that the job would use. It works for any model and any device mesh, and runs in a
single process. From this plan, it estimates the time, memory and communication of an optimizer step.
"""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.job import Exact
from shardmuon.foresight.report import Price, Report, plan

__all__ = ["Exact", "Hardware", "Price", "Report", "plan"]
