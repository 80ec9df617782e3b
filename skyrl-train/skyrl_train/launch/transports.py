"""The transport of a weight sync between processes, where the configured one cannot be used."""

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
    """Return the options with the transport between models on this kind of device.

    A receiver may share a device with the sender. Log a transport that replaces the configured one.
    """
    transport = transport_between(options, device, shares_devices=shares_devices)
    if transport != options.transport != "auto":
        logger.info(
            "generator.weight_sync_backend=%s: weights travel through %s, because %s",
            *(options.transport, *REASONS[transport]),
        )
    return replace(options, transport=transport)
