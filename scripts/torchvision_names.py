"""Makes torchvision importable beside a CPU torch; scripts/stack.sh puts it into .venv-stack if that is needed.

PyPI's torchvision is built for PyPI's CUDA torch: beside another its operators are missing, and its Python code stops
at registering shapes for them. Nothing here calls them, so their names are enough. They are made when somebody looks
for torchvision, not before: every start of Python runs this, and most do not need torch.
"""

import contextlib
import sys


class _Names:
    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        import torch

        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _Names)
