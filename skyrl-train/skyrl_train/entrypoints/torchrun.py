"""Starting a command under torchrun, without importing PyTorch in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.errors import ConfigError


def replace_by_torchrun(arguments: Sequence[str], placement: RunPlacementConfig, flags: Sequence[str] = ()) -> NoReturn:
    """Replace this process by torchrun. Its processes run `skyrl` with these arguments.

    `flags` are additional flags of torchrun, such as `--node_rank=1`. Without a flag for the rendezvous, torchrun uses
    a free port of this machine.

    Raises:
        ConfigError: there are several nodes, and no flag for their rendezvous.
    """
    n_nodes, n_per_node = placement.size("policy")
    has_rendezvous = any(flag.startswith(("--standalone", "--rdzv", "--master")) for flag in flags)
    if n_nodes > 1 and not has_rendezvous:
        raise ConfigError(
            f"trainer.placement.policy_num_nodes={n_nodes}: trainer.placement.launcher=torchrun starts the ranks of "
            f"one node; run torchrun --nnodes={n_nodes} --nproc_per_node={n_per_node} --rdzv_backend=c10d "
            "--rdzv_endpoint=<first node>:29400 --no-python skyrl … on each node, or set trainer.placement.launcher=ray"
        )
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_per_node)))  # otherwise torchrun sets 1 and warns
    counts = [f"--nnodes={n_nodes}", f"--nproc_per_node={n_per_node}"]
    torchrun = ["-m", "torch.distributed.run", *counts, *([] if has_rendezvous else ["--standalone"]), *flags]
    command = [sys.executable, *torchrun, "-m", "skyrl_train.entrypoints.cli", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
