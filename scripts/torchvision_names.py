"""Make torchvision importable with a CPU build of torch. If needed, scripts/stack.sh puts this file into .venv-stack.

The torchvision on PyPI is built for PyPI's CUDA build of torch. With a CPU build of torch, torchvision's operators are
missing, and `import torchvision` fails when it registers shapes for them. This project does not call these operators,
so it is enough to define their names. Python runs this file at every start, so the file imports torch only when
torchvision is imported.
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
            with contextlib.suppress(RuntimeError):  # raised if the operator already exists
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _Names)
