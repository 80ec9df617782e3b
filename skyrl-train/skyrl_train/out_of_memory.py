"""Recognize that memory ran out, free what the failed computation holds, and describe the memory that is left."""

from __future__ import annotations

import errno
import resource
import traceback
from pathlib import Path

import psutil

from skyrl_train.errors import OutOfMemoryError
from skyrl_train.lazy import torch
from skyrl_train.timer import GIGABYTE, peak_memory

MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
"""Parts of the messages with which PyTorch, its CPU allocator and CUDA's libraries report a lack of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error of PyTorch, NumPy, Python, the system or a rank means that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        return isinstance(error, torch.OutOfMemoryError) or any(part in text for part in MESSAGES)
    return isinstance(error, MemoryError | OutOfMemoryError)


def free_references(error: BaseException) -> None:
    """Free the tensors in the frames of an error and its causes, so that a retry has their memory.

    Frames that still run keep their variables.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__, cause = None, cause.__cause__ or cause.__context__


def describe_memory() -> str:
    """Return the peak and the free memory of the GPU, or without a GPU of this process and its machine."""
    peak = peak_memory.measure() / GIGABYTE
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"peak {peak:.2f} GB, and {free / GIGABYTE:.2f} of the GPU's {total / GIGABYTE:.1f} GB are free"
    memory = psutil.virtual_memory()
    text = f"peak {peak:.2f} GB, and {memory.available / GIGABYTE:.2f} of {memory.total / GIGABYTE:.1f} GB are free"
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return f"{text}, but ulimit allows this process {min(limits) / GIGABYTE:.2f} GB" if limits else text


def describe_shortage(error: BaseException) -> str:
    """Return where an error of PyTorch, NumPy or the system was raised, and its first line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}: {(str(error) or 'no memory').splitlines()[0]}"
