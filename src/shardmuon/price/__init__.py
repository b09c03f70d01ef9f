"""Estimates of the time (price) of an optimizer step, made from the speed of a machine without allocating tensors or
starting ranks. The planner uses them to choose a plan. They are computed with integers, so all ranks choose the same
plan."""
