"""Makes torchvision importable beside a CPU torch.

PyPI's torchvision is built for PyPI's CUDA torch: beside another its operators are missing, and its Python code stops
at registering shapes for them. Nothing here calls them, so their names are enough.
"""

import contextlib

import torch

for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # it is there
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
