"""Make torchvision importable beside a CPU build of torch: `PYTHONPATH=tests/vision`.

PyPI's wheel of torchvision is compiled for CUDA. Its operators, such as `nms`, cannot load beside torch's CPU build,
and describing them to torch then fails. Image processors use none of them, so the descriptions are skipped.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            register = torch.library.register_fake

            def register_fake(op: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(op, str) and op.startswith("torchvision::"):
                    return lambda function: function
                return register(op, *args, **kwargs)

            torch.library.register_fake = register_fake


sys.meta_path.insert(0, _Finder())
