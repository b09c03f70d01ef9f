"""Estimate the time (price) of a step from the speed of a machine, in integer arithmetic, without tensors or running
ranks. The planner uses these estimates to choose a plan."""
