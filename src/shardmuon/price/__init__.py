"""Estimate the time (price) of a step from the speed of a machine, without tensors and without running ranks. The
planner uses these estimates to choose a plan. Estimates are computed with integers, so all ranks choose the same
plan."""
