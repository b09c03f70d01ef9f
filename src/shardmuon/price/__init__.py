"""Time estimates for optimizer steps, which the planner uses to choose a plan. They are computed from the speed of a
machine, without allocating tensors or starting ranks. The arithmetic is exact, so all ranks choose the same plan."""
