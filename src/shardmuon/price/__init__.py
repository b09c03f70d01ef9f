"""Time estimates for optimizer steps, which the planner uses to choose a plan. They are computed from the speed of a
machine, without allocating tensors or starting ranks. The planner uses integers, so all ranks choose the same plan."""
