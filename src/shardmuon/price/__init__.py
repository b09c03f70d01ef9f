"""Estimate the time (price) of an optimizer step from the speed of a machine, without allocating tensors or starting
ranks. The planner uses these estimates to choose a plan. Estimates are computed with integers, so all ranks choose the
same plan."""
