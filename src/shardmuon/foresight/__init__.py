"""Estimate the cost of Muon in a training job before the job runs.

`plan` makes the plan that the job itself would make, for any model on any mesh, without starting ranks, and estimates
the time, memory and communication of an optimizer step.
"""

from __future__ import annotations

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.job import Exact
from shardmuon.foresight.report import Price, Report, plan

__all__ = ["Exact", "Hardware", "Price", "Report", "plan"]
