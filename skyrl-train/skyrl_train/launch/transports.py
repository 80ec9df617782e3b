"""Choice of the weight sync transport between processes if the configured one cannot be used."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from skyrl_train.weight_sync import SyncOptions, transport_between

logger = logging.getLogger(__name__)

REASONS = {
    "auto": ("shared memory, and gloo between nodes", "the policy is not on a GPU"),
    "cuda_ipc": ("CUDA IPC", "sender and receiver are on the same GPUs"),
    "nccl": ("NCCL", "sender and receiver are on different GPUs"),
}
"""Name of each transport that may replace the configured one, and the reason to log."""


def with_transport(options: SyncOptions, device: torch.device, *, shares_devices: bool) -> SyncOptions:
    """Return the options with the transport to use on this kind of device.

    `shares_devices` means that receivers are on the sender's devices. Log the transport if it replaces the configured
    one.
    """
    transport = transport_between(options, device, shares_devices=shares_devices)
    if transport != options.transport != "auto":
        logger.info(
            "generator.weight_sync_backend=%s: weights travel through %s, because %s",
            *(options.transport, *REASONS[transport]),
        )
    return replace(options, transport=transport)
