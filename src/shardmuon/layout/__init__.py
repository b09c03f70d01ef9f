"""Layouts. The layout of a parameter describes which parts of the parameter's matrices each rank stores. The ranks
build a table of the layouts of all parameters, which optimizer steps, gradient clipping and checkpoints read."""
