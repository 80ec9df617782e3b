"""Base class for experiments: run folder and locks, logging, seeds, compute thread, trackers, launchers, interrupts."""

import asyncio
import gc
import logging
import math
import os
import random
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from skyrl_train.checkpoint import DISK_ERRORS, CheckpointStore, folder_lock, make_folder
from skyrl_train.config.memory_settings import suggest_settings
from skyrl_train.config.problems import raise_problems
from skyrl_train.entrypoints.command import log_to_console
from skyrl_train.entrypoints.preflight import find_unusable_folders, saved_folders
from skyrl_train.errors import ConfigError, EnvError, OutOfMemoryError, StorageError
from skyrl_train.launch.inline import InlineLauncher
from skyrl_train.launch.launcher import Launcher, ModelLauncher, started
from skyrl_train.launch.torchrun import Torchrun, TorchrunLauncher, serve_driver
from skyrl_train.models.loading import default_device, load_model
from skyrl_train.out_of_memory import describe_memory, describe_shortage, free_references, is_out_of_memory
from skyrl_train.plan import RunPlan
from skyrl_train.run import Run
from skyrl_train.threads import compute_thread
from skyrl_train.timer import StepTimer
from skyrl_train.tracking import Tracking, create_run_folder, log_to_file
from skyrl_train.types.specs import Role
from skyrl_train.watchdog import Watchdog
from skyrl_train.weight_sync import SyncOptions

logger = logging.getLogger(__name__)


class Experiment(ABC):
    """One run in its folder. Subclasses override `_run`."""

    trains: ClassVar[bool] = True
    """True for a run that reads the training data and writes checkpoints."""

    def __init__(self, cfg: Any) -> None:
        """Create the run folder. Raise a ConfigError that lists every folder that cannot be written."""
        self.cfg = cfg
        raise_problems(find_unusable_folders(self.cfg.trainer, trains=self.trains))
        self.run_folder = create_run_folder(
            self.cfg.trainer.output_dir, self.cfg.trainer.project_name, self.cfg.trainer.run_name
        )
        self._compute: ThreadPoolExecutor | None = None
        self._launcher: Launcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes need to load models."""
        return self.__dict__ | {"_compute": None, "_launcher": None}

    def run(self) -> None:
        """Train to the last step. Raise KeyboardInterrupt if a callback or a signal stops the run earlier.

        Under torchrun, rank 0 trains, and all other processes serve as its ranks.
        """
        torchrun = Torchrun.find()
        if torchrun is not None and torchrun.rank > 0:
            serve_driver(torchrun)
            return
        self.check_run_folder()
        with self.running():
            logger.info("Run folder: %s", self.run_folder.path)
            try:
                asyncio.run(self._run())
            except KeyboardInterrupt:
                name = self.cfg.trainer.run_name
                logger.info("Stopped. With trainer.run_name=%s, the same command %s", name, self._describe_rerun())
                raise
            except SystemExit as error:  # user code called sys.exit in a task; its status 0 would look like success
                raise EnvError(
                    f"the run stopped because an environment, callback or reward function called "
                    f"sys.exit({error.code!r}); raise an error there instead. With "
                    f"trainer.run_name={self.cfg.trainer.run_name}, the same command {self._describe_rerun()}"
                ) from error
            logger.info("The run is in %s; open its %s", self.run_folder.path, self.run_folder.report.name)

    def check_run_folder(self) -> None:
        """Raise ConfigError if an evaluation has written to the run folder."""
        if self.run_folder.has_separate_evaluation:
            raise ConfigError(
                f"{self.run_folder.path} is a folder of `skyrl generate`; set trainer.run_name to another name"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lock the folders of the run, log to its folder, set the seeds and start the compute thread.

        Raises:
            StorageError: a disk is full, protected or broken, wherever the run writes.
            OutOfMemoryError: memory ran out. The message names settings that reduce it.
        """
        log_to_console()
        disable_progress_bar()  # transformers shows one for each file
        run, seed = self.run_folder.path, self.cfg.trainer.seed
        try:
            with ExitStack() as stack:
                # In any of these folders, another run would remove incomplete checkpoints or exports of this run.
                stack.enter_context(folder_lock(run, "wait until it ends, or give this run another trainer.run_name"))
                locked = [run]
                for key, path in saved_folders(self.cfg.trainer, trains=self.trains).items():
                    folder = Path(path)
                    make_folder(folder)
                    if not any(folder.samefile(other) for other in locked):
                        stack.enter_context(folder_lock(folder, f"wait until it ends, or set another {key}", run))
                        locked.append(folder)
                stack.enter_context(log_to_file(self.run_folder.train_log))
                limits = self.cfg.trainer.watchdog
                stack.enter_context(Watchdog(run, limits.warn_after_seconds, limits.limit_seconds))
                stack.enter_context(collect_rarely())
                self._compute = stack.enter_context(compute_thread())
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
                yield
        except Exception as error:
            if is_out_of_memory(error):
                shortage = self._explain_shortage(error)
                free_references(error)
                raise shortage from None
            if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
                raise
            raise StorageError(
                f"a file of the run in {run} could not be written: {error}. Free disk space or make the folder "
                f"writable, then rerun the command: it {self._describe_rerun()}"
            ) from error

    def _explain_shortage(self, error: Exception) -> OutOfMemoryError:
        """Return the error that memory ran out, with settings to change and the step to resume from."""
        if isinstance(error, OutOfMemoryError):
            text, stage = str(error), error.stage
        else:  # outside of ranks and engines
            text, stage = f"the run ran out of memory ({describe_memory()}): {describe_shortage(error)}", "driver"
        settings = ", ".join(suggest_settings(self.cfg, stage, has_gpu=torch.cuda.is_available()))
        return OutOfMemoryError(
            f"{text}. To save memory, set (the cheapest first) {settings}. `skyrl plan` shows the forecast. With "
            f"trainer.run_name={self.cfg.trainer.run_name}, the same command {self._describe_rerun()}",
            stage,
        )

    def _describe_rerun(self) -> str:
        trainer = self.cfg.trainer
        return CheckpointStore(
            Path(trainer.ckpt_path), resume_mode=trainer.resume_mode, resume_path=trainer.resume_path
        ).describe_rerun()

    def replaces(self, *methods: str) -> bool:
        """Return True if a subclass overrides one of these methods. Callers then skip checks of the original."""
        owners = (next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in methods)
        return not all(cls.__module__.startswith("skyrl_train.") for cls in owners)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The cached result of `get_tokenizer`."""
        return self.get_tokenizer()

    @abstractmethod
    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the policy's tokenizer, with the configured chat template."""

    def load_language_model(self, path: str, key: str) -> PreTrainedModel:
        """Load the causal language model at `path`, the value of the configuration key `key`."""
        return load_model(path, key=key, **self.loading_options(self.cfg.trainer.policy.model.dtype))

    def loading_options(self, dtype: str) -> dict[str, Any]:
        """Return the options with which the run loads a model in `dtype`."""
        checkpointing = self.cfg.trainer.gradient_checkpointing
        return {"dtype": getattr(torch, dtype), "device": default_device(), "gradient_checkpointing": checkpointing}

    def get_tracker(self) -> Tracking:
        """Open the metrics backends."""
        trainer = self.cfg.trainer
        config = self.cfg.model_dump(mode="json")
        if trainer.wandb_environment:
            names = [name for name in trainer.wandb_environment if name in os.environ]
            config["environment_variables"] = {name: os.environ[name] for name in names}
        folder, ckpt_path = self.run_folder.path, Path(trainer.ckpt_path).resolve()
        is_elsewhere = self.trains and not ckpt_path.is_relative_to(folder)
        id_dir = ckpt_path if is_elsewhere else folder  # a run with another run folder may resume the checkpoints
        return Tracking(trainer.project_name, trainer.run_name, trainer.logger, config, folder, id_dir)

    def open_tracker(self) -> Tracking:
        """Return the result of `get_tracker`. Raise ConfigError unless it is a `Tracking`."""
        tracker = self.get_tracker()
        if not isinstance(tracker, Tracking):
            raise ConfigError(
                f"{type(self).__name__}.get_tracker() returned a {type(tracker).__name__}; return the result of "
                "super().get_tracker(), after adding your backend to it with its method add"
            )
        return tracker

    def new_launcher(
        self, roles: Sequence[Role], plan: RunPlan | None = None, sync: SyncOptions | None = None
    ) -> Launcher:
        """Create the launcher that `trainer.placement` selects.

        It runs the models in `roles` and the engines of `plan`, if any. `sync` configures weight syncs between them.
        Raise ConfigError if the Ray cluster does not answer or is too small, or torchrun has started several processes.
        """
        torchrun = Torchrun.find()
        if torchrun is not None and torchrun.size > 1:
            raise ConfigError(
                f"torchrun has started {torchrun.size} processes, but this kind of run starts its own; start it "
                f"without torchrun, with trainer.placement.policy_num_gpus_per_node={torchrun.size}"
            )
        placement = self.cfg.trainer.placement
        if placement.uses_ray:
            from skyrl_train.launch.ray.launcher import RayLauncher  # ray is optional

            generator = None if plan is None else plan.cfg.generator
            n_engines, size = (generator.n_local_engines, generator.n_devices_per_engine) if generator else (0, 1)
            return RayLauncher(placement, roles, sync, n_engines=n_engines, engine_size=size)
        assert self._compute is not None, "running() comes first"
        if plan is None:
            return InlineLauncher(self._compute, sync)
        return InlineLauncher(
            self._compute,
            sync,
            plan.receiving_servers,
            offloads_idle=plan.offloads_idle,
            frees_cache=self.trains and plan.frees_cache,
            has_engine_process=self.trains and plan.cfg.has_engine_process,
        )

    @asynccontextmanager
    async def launching(self, plan: RunPlan, roles: Sequence[Role], sync: SyncOptions) -> AsyncIterator[Launcher]:
        """Start the processes of the models in `roles` and of the engines. End them on exit."""
        launcher = self.new_launcher(roles, plan, sync)
        try:
            async with started(launcher) as self._launcher:
                yield launcher
        finally:
            self._launcher = None

    def new_model_launcher(self, roles: Sequence[Role]) -> ModelLauncher:
        """Create the launcher of a run without an engine. It uses the processes that torchrun started, if any.

        Raises:
            ConfigError: as `new_launcher`, or `trainer.placement` does not match the processes of torchrun.
        """
        torchrun, placement = Torchrun.find(), self.cfg.trainer.placement
        if not placement.uses_torchrun and (torchrun is None or torchrun.size == 1):
            return self.new_launcher(roles)
        if torchrun is None:
            n_ranks = math.prod(placement.size("policy"))
            raise ConfigError(
                f"trainer.placement.launcher=torchrun needs {n_ranks} processes, but torchrun has not started this "
                "one; run your script with torchrun, or set trainer.placement.launcher=ray"
            )
        torchrun.check(placement)
        assert self._compute is not None, "running() comes first"
        return TorchrunLauncher(self._compute, torchrun)

    @abstractmethod
    async def _run(self) -> None:
        """Load the models and data, and train."""


async def train(trainer: Run, loading: StepTimer) -> None:
    """Train to the last step, and report the time and memory of `loading` with each. KeyboardInterrupt if it stops."""
    trainer.gauges |= loading.metrics()
    with on_first_interrupt(lambda: trainer.request_stop("interrupted")):
        await trainer.train()
    if trainer.is_stopping and trainer.global_step < trainer.total_steps:
        raise KeyboardInterrupt


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the context, and collect new objects less often.

    Imported libraries and rollouts in flight are millions of objects, and scanning them takes half of the agent loop's
    time (`make bench-loop`). Reference counting still frees objects at once; only cycles wait longer.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def on_first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C, SIGTERM or SIGHUP. A second Ctrl-C or SIGTERM kills the program at once.

    The kill does not close engines and environments, because that could take as long as the step. This is safe: files
    are complete or absent at any time, and child processes end with their parent.

    A closing terminal may cause several SIGHUPs, from the shell and from the kernel, so SIGHUP is ignored after the
    first signal. If `nohup` ignores it, it stays ignored.

    The context needs a running event loop. Outside the main thread it does nothing, because only the main thread
    receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    on_hangup, on_interrupt = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT)
    if on_hangup is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def exit_at_once(number: int, _: object) -> None:
        os.write(2, b"\nstopped at once, without a checkpoint of this step\n")
        os._exit(128 + number)

    def on_first() -> None:
        remove()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, exit_at_once)
        stop()

    for number in numbers:
        loop.add_signal_handler(number, on_first)
    try:
        yield
    finally:
        remove()
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGHUP, on_hangup)
