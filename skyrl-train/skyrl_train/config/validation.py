"""Rules that tie several keys together: each is a small function that yields one sentence per problem.

The type and range of a single key belong to its field. Rules that read the traits of the registered estimator and
policy loss are in `skyrl_train.algorithms.rules`.
"""

from __future__ import annotations

import math
import netrc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

from skyrl_train.config.base import Section, value_at
from skyrl_train.config.policy import LoraConfig, OptimizerConfig
from skyrl_train.config.problems import Rule, show
from skyrl_train.config.root import REWARD_FUNCTION_ENV, SkyRLConfig
from skyrl_train.config.run import RunPlacementConfig

CORRECTION = "trainer.algorithm.off_policy_correction"

MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")

UNUSUAL_TEMPERATURE = 3.0

UNUSUAL_TIMEOUT_S = 1.0

INTERVALS = (
    (f"{CORRECTION}.product_mask_low", f"{CORRECTION}.product_mask_high"),
    (f"{CORRECTION}.geo_mask_low", f"{CORRECTION}.geo_mask_high"),
    (f"{CORRECTION}.token_mask_is_threshold_low", f"{CORRECTION}.token_mask_is_threshold_high"),
    (f"{CORRECTION}.outlier_token_is_threshold_low", f"{CORRECTION}.outlier_token_is_threshold_high"),
    ("trainer.algorithm.clip_cov.clip_cov_lb", "trainer.algorithm.clip_cov.clip_cov_ub"),
    ("trainer.algorithm.rollout_is.ratio_low", "trainer.algorithm.rollout_is.ratio_high"),
)


def mini_batches_divide_batch(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse mini-batches of unequal numbers of prompts."""
    batch, sizes = cfg.trainer.train_batch_size, {"policy": cfg.trainer.policy_mini_batch_size}
    if cfg.trainer.critic.model.path is not None:
        sizes["critic"] = cfg.trainer.critic_mini_batch_size
    for role, size in sizes.items():
        if batch % size:
            divisors = [n for n in range(1, batch + 1) if batch % n == 0]
            nearest = [n for n in divisors if n < size][-1:] + [n for n in divisors if n > size][:1]
            yield (
                f"trainer.{role}_mini_batch_size={size} must divide trainer.train_batch_size={batch}; try "
                f"{' or '.join(map(str, nearest))}"
            )


def sequence_norm_has_a_length(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse `seq_mean_token_sum_norm` without the constant that it divides by."""
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len=null, "
            f"which cannot be computed with generator.max_turns={cfg.generator.max_turns} and "
            "generator.max_input_length=null; set trainer.algorithm.max_seq_len"
        )


def training_temperature_is_positive(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse to divide the logits by the temperature of greedy rollouts."""
    if cfg.trainer.algorithm.temperature == 0:
        yield (
            "generator.sampling_params.temperature=0.0 (greedy) cannot divide the logits in training, but "
            "trainer.algorithm.temperature=null uses it; try generator.sampling_params.temperature=1.0, or set "
            "trainer.algorithm.temperature=1.0 if rollouts should be greedy"
        )


def input_length_covers_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse an input limit below the longest prompt, or above it when there is a single turn."""
    n_prompt, n_input = cfg.trainer.max_prompt_length, cfg.generator.max_input_length
    if n_input is None:
        return
    if cfg.generator.max_turns == 1 and n_input != n_prompt:
        yield (
            f"generator.max_input_length={n_input} must equal trainer.max_prompt_length={n_prompt} when "
            f"generator.max_turns=1; try generator.max_input_length={n_prompt}, or null"
        )
    elif n_input < n_prompt:
        yield (
            f"generator.max_input_length={n_input} must be at least trainer.max_prompt_length={n_prompt}; "
            f"try generator.max_input_length={n_prompt} or more, or null for the model's context length"
        )


def launcher_starts_every_process(cfg: Section) -> Iterator[str]:
    """Refuse several processes without Ray."""
    placement: RunPlacementConfig = value_at(cfg, "trainer.placement")
    if placement.launcher != "inline":
        return
    for name in (name for name in type(placement).model_fields if "_num_" in name):
        role, _, unit = name.partition("_num_")
        value, of_policy = getattr(placement, name), getattr(placement, f"policy_num_{unit}")
        if value != 1 and (role == "policy" or value != of_policy):  # null takes the policy's
            yield (
                f"trainer.placement.{name}={value} takes several processes, but trainer.placement.launcher=inline is "
                f"one; set trainer.placement.launcher=ray, or trainer.placement.{name}=1"
            )
    if not placement.shares_devices:
        yield (
            "trainer.placement.colocate_all=false: trainer.placement.launcher=inline trains and samples in one "
            "process; set trainer.placement.launcher=ray, or trainer.placement.colocate_all=true"
        )


def colocated_models_have_the_same_size(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse models that share GPUs but differ in the number of them."""
    placement = cfg.trainer.placement
    if not placement.uses_ray:
        return
    colocated = []
    if placement.colocate_all and cfg.trainer.critic.model.path is not None:
        colocated.append("critic")
    if placement.colocate_all or placement.colocate_policy_ref:
        colocated.append("ref")
    sharing = "colocate_all" if placement.colocate_all else "colocate_policy_ref"
    for role in colocated:
        for unit in ("nodes", "gpus_per_node"):
            value, needed = (getattr(placement, f"{name}_num_{unit}") for name in (role, "policy"))
            if value != needed:
                yield (
                    f"trainer.placement.{role}_num_{unit}={value} must equal trainer.placement.policy_num_{unit}="
                    f"{needed} with trainer.placement.{sharing}=true; remove it, or set "
                    f"trainer.placement.{sharing}=false"
                )


def weights_have_a_transport(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a transport of weights that does not exist, and changes that nothing can apply."""
    generator = cfg.generator
    if cfg.trainer.placement.uses_ray and generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl: this version sends weights to other processes through shared memory "
            "or gloo; set generator.weight_sync_backend=auto"
        )
    if not generator.weight_sync_delta:
        return
    if not cfg.trainer.placement.uses_ray:
        yield (
            "generator.weight_sync_delta=true sends changes to another process, and this run has one; set "
            "generator.weight_sync_delta=false, or trainer.placement.launcher=ray"
        )
    elif generator.backend not in ("auto", "hf"):
        yield (
            f"generator.weight_sync_delta=true: generator.backend={generator.backend} holds the weights in another "
            "layout and cannot apply changes; set generator.weight_sync_delta=false, or generator.backend=hf"
        )


SGLANG_REFUSES = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
ENGINE_SIZES = tuple(f"generator.inference_engine_{name}_parallel_size" for name in ("tensor", "pipeline", "data"))
SERVER_OPTIONS = (
    *ENGINE_SIZES,
    "generator.max_num_seqs",
    "generator.max_num_batched_tokens",
    "generator.gpu_memory_utilization",
    "generator.enforce_eager",
    "generator.enable_prefix_caching",
    "generator.enable_chunked_prefill",
)


def one_engine_is_enough(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse several engines."""
    if (n_engines := cfg.generator.num_inference_engines) != 1:
        yield (
            f"generator.num_inference_engines={n_engines}: this version samples with one engine; set "
            "generator.num_inference_engines=1"
        )


def engine_fits_its_devices(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse an engine on more devices than it has, or can use."""
    generator, placement = cfg.generator, cfg.trainer.placement
    for key in ENGINE_SIZES:
        if (size := value_at(cfg, key)) == 1 or not generator.run_engines_locally:
            continue
        if generator.backend not in ("vllm", "sglang"):
            yield (
                f"{key}={size}: generator.backend={generator.backend} is the embedded engine, which computes on one "
                f"device; set {key}=1, or generator.backend=vllm"
            )
        elif generator.backend == "vllm" and not placement.uses_ray:
            yield (
                f"{key}={size}: vLLM in the trainer's process computes on one device; set "
                f"trainer.placement.launcher=ray, or {key}=1"
            )
        elif placement.uses_ray:
            yield (
                f"{key}={size}: this version reserves one device for an engine on a Ray cluster; start a server with "
                f"{size} GPUs (docs/guides/inference-engines.md) and set generator.run_engines_locally=false, or "
                f"{key}=1"
            )


def servers_have_addresses(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse servers without an address, addresses that are not used, and options that a running server has already."""
    generator = cfg.generator
    urls = generator.remote_inference_engine_urls
    if generator.run_engines_locally:
        if urls:
            yield (
                f"generator.remote_inference_engine_urls={show(urls)} is not read with "
                "generator.run_engines_locally=true; set generator.run_engines_locally=false, or remove it"
            )
        return
    if len(urls) != 1:
        yield (
            f"generator.remote_inference_engine_urls={show(urls)}: generator.run_engines_locally=false needs the "
            "address of one server; set generator.remote_inference_engine_urls=[127.0.0.1:8000]"
        )
    if generator.backend not in ("vllm", "sglang"):
        yield (
            f"generator.backend={generator.backend}: generator.run_engines_locally=false needs the kind of the server; "
            "set generator.backend=vllm or generator.backend=sglang"
        )
    options = {key: value_at(cfg, key) for key in SERVER_OPTIONS if value_at(cfg, key) != _default(key)}
    kwargs = {name: value for name, value in generator.engine_init_kwargs.items() if name != "chat_template"}
    if kwargs:
        options["generator.engine_init_kwargs"] = kwargs
    for key, value in options.items():
        yield (
            f"{key}={show(value)} is an option of an engine that the run starts, and "
            f"generator.run_engines_locally=false uses a running server; remove {key}, and start the server with it"
        )


def _default(key: str) -> object:
    return value_at(SkyRLConfig(), key)


def engine_has_its_options(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse options that the embedded engine does not have, and sampling whose log-probs SGLang does not report."""
    generator = cfg.generator
    if generator.backend == "sglang":
        for section, name in product(("sampling_params", "eval_sampling_params"), SGLANG_REFUSES):
            key = f"generator.{section}.{name}"
            if (value := value_at(cfg, key)) != _default(key):
                yield (
                    f"{key}={show(value)}: generator.backend=sglang cannot report the log-probs of what this samples; "
                    f"remove {key}, or set generator.backend=vllm"
                )
    if generator.backend in ("vllm", "sglang"):
        return
    if kwargs := {name: value for name, value in generator.engine_init_kwargs.items() if name != "chat_template"}:
        yield (
            f"generator.engine_init_kwargs={show(kwargs)} are options of vLLM or SGLang, and "
            f"generator.backend={generator.backend} is the embedded engine; remove them, or set generator.backend=vllm"
        )
    for name, allowed, reason in (
        ("enforce_eager", True, "captures no CUDA graphs"),
        ("enable_prefix_caching", True, "keeps keys and values of a session until it ends"),
        ("enable_chunked_prefill", True, "always reads long prompts in several steps"),
    ):
        if getattr(generator, name) != allowed:
            yield (
                f"generator.{name}={show(not allowed)}: generator.backend={generator.backend} is the embedded engine, "
                f"which {reason}; set generator.{name}={show(allowed)}, or generator.backend=vllm"
            )


def engine_is_installed(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse an engine whose package is missing."""
    backend = cfg.generator.backend
    names = {"vllm": "vLLM", "sglang": "SGLang"}
    if backend in names and cfg.generator.run_engines_locally and find_spec(backend) is None:
        yield (
            f"generator.backend={backend}: {names[backend]} is not installed; install it (docs/start/install.md), or "
            "set generator.backend=auto for the embedded engine"
        )


def ray_is_installed(cfg: Section) -> Iterator[str]:
    """Refuse several processes if the package that starts them is missing."""
    placement: RunPlacementConfig = value_at(cfg, "trainer.placement")
    if placement.uses_ray and find_spec("ray") is None:
        ranks = " × ".join(map(str, placement.size("policy")))
        yield (
            f"trainer.placement.launcher={placement.launcher} with {ranks} ranks of the policy needs Ray, which is not "
            "installed; pip install 'skyrl-train[ray]', or train in one process with trainer.placement.launcher=inline"
        )


def sharding_fits_ranks(cfg: Section) -> Iterator[str]:
    """Refuse groups of ranks that do not divide the ranks of a model, and offloading without ranks."""
    placement: RunPlacementConfig = value_at(cfg, "trainer.placement")
    trainer: Section = value_at(cfg, "trainer")
    for role in ("policy", "critic", "ref"):
        if role not in type(trainer).model_fields:
            continue
        key, fsdp = f"trainer.{role}.fsdp_config", value_at(trainer, role).fsdp_config
        n_ranks = math.prod(placement.size(role))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            n_ranks = int(os.environ["WORLD_SIZE"])
        n_shards = n_ranks if fsdp.fsdp_size < 1 else fsdp.fsdp_size
        if n_ranks % n_shards:
            yield (
                f"{key}.fsdp_size={fsdp.fsdp_size} must divide the {n_ranks} ranks of the {role}; try "
                f"{_divisors(n_ranks)}, or -1 for all"
            )
            continue
        group = fsdp.reshard_after_forward
        if not isinstance(group, bool) and (n_shards % group or group in (1, n_shards)):
            choices = [n for n in range(2, n_shards) if n_shards % n == 0]
            yield (
                f"{key}.reshard_after_forward={group} must be a true divisor of the {n_shards} ranks that share the "
                f"weights; try {' or '.join(map(str, [*choices, 'true', 'false']))}"
            )
        if n_ranks == 1 and (fsdp.cpu_offload or fsdp.param_dtype != "auto"):
            name = "cpu_offload" if fsdp.cpu_offload else "param_dtype"
            yield (
                f"{key}.{name}={show(value_at(fsdp, name))} needs FSDP2, and a single rank holds the whole model; set "
                f"trainer.placement.{role}_num_gpus_per_node=2 or more, or remove it"
            )


def _divisors(n: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, n + 1) if n % divisor == 0)


def evaluation_has_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse evaluation without prompts."""
    if not cfg.data.val_data and cfg.data.custom_cls.path is None and cfg.trainer.eval_interval > 0:
        yield (
            f"data.val_data=[] leaves nothing to evaluate every trainer.eval_interval={cfg.trainer.eval_interval} "
            "steps; set data.val_data or trainer.eval_interval=-1"
        )


def training_has_prompts(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse training without prompts."""
    if cfg.data.custom_cls.path is None:
        yield from training_has_rows(cfg)


def training_has_rows(cfg: Section) -> Iterator[str]:
    """Refuse training without data files or datasets."""
    if not value_at(cfg, "data.train_data"):
        yield "data.train_data=[] leaves nothing to train on; set data.train_data=[<file or dataset name>]"


def custom_dataset_is_complete(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse half a dataset class, options without one, and a mixture of rows that are not known before."""
    custom = cfg.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        given, missing = ("path", "name") if custom.name is None else ("name", "path")
        yield (
            f"data.custom_cls.{given}={show(getattr(custom, given))} needs data.custom_cls.{missing} too: a dataset "
            "class is the name of a class and the path of its file"
        )
    elif custom.path is None and custom.config:
        yield (
            f"data.custom_cls.config={show(custom.config)} has no class to configure; set data.custom_cls.path and "
            "data.custom_cls.name"
        )
    elif custom.path is not None and cfg.data.mixture.is_used:
        yield (
            f"data.mixture reads all rows before training, and data.custom_cls.path={show(custom.path)} creates them "
            "when they are drawn; remove one of them"
        )


def custom_reward_function_is_called(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a reward function beside an environment that scores replies itself."""
    path, env_class = cfg.custom_reward_function.path, cfg.environment.env_class
    if path is not None and env_class != REWARD_FUNCTION_ENV:
        yield (
            f"custom_reward_function.path={show(path)} scores replies in place of environment.env_class={env_class}; "
            "remove one of them"
        )
    if path is not None and cfg.generator.max_turns > 1:
        yield (
            f"custom_reward_function.path={show(path)} scores one reply, so generator.max_turns="
            f"{cfg.generator.max_turns} has no effect; set generator.max_turns=1"
        )


def sampling_lengths_are_ordered(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a minimum length of a turn above its maximum."""
    for key in ("generator.sampling_params", "generator.eval_sampling_params"):
        sampling = value_at(cfg, key)
        if sampling.min_tokens > sampling.max_generate_length:
            yield (
                f"{key}.min_tokens={sampling.min_tokens} must be at most "
                f"{key}.max_generate_length={sampling.max_generate_length}; try {key}.min_tokens=0"
            )


def _optimizers(cfg: Section) -> Iterator[tuple[str, OptimizerConfig]]:
    """Yield the key and the settings of each optimizer of a run."""
    for role in ("policy", "critic"):
        key = f"trainer.{role}.optimizer_config"
        with suppress(KeyError):  # supervised runs have no critic
            yield key, value_at(cfg, key)


def warmup_is_set_once(cfg: Section) -> Iterator[str]:
    """Refuse a warm-up in steps together with one as a fraction."""
    for key, optimizer in _optimizers(cfg):
        if optimizer.num_warmup_steps and optimizer.warmup_ratio:
            yield (
                f"{key}.num_warmup_steps={optimizer.num_warmup_steps} and {key}.warmup_ratio="
                f"{optimizer.warmup_ratio:g} both set the warm-up; set one of them to 0"
            )


def weight_decay_shrinks_weights(cfg: Section) -> Iterator[str]:
    """Refuse a weight decay that erases the weights or changes their sign in one step."""
    for key, optimizer in _optimizers(cfg):
        if optimizer.lr * optimizer.weight_decay >= 1:
            yield (
                f"{key}.weight_decay={optimizer.weight_decay:g} times {key}.lr={optimizer.lr:g} must be below 1, or a "
                f"step erases the weights; try {key}.weight_decay=0.01"
            )


def _adapters(cfg: Section) -> Iterator[tuple[str, LoraConfig]]:
    """Yield the key and the settings of the adapter of each trained model."""
    for role in ("policy", "critic"):
        key = f"trainer.{role}.model.lora"
        with suppress(KeyError):  # supervised runs have no critic
            yield key, value_at(cfg, key)


def adapters_are_possible(cfg: Section) -> Iterator[str]:
    """Refuse dropout in an adapter, and a choice of matrices for an adapter that has its own."""
    for key, lora in _adapters(cfg):
        if lora.dropout > 0:
            yield (
                f"{key}.dropout={lora.dropout:g} would make the log-probs of training random, unlike those of "
                f"sampling; set {key}.dropout=0"
            )
        for name in _changed_fields(lora) & {"target_modules", "exclude_modules"}:
            if lora.lora_path is not None:
                yield (
                    f"{key}.{name}={show(value_at(lora, name))}: the adapter in {key}.lora_path={show(lora.lora_path)} "
                    f"has its own matrices; remove {key}.{name}"
                )


def adapters_are_on(cfg: Section) -> Iterator[str]:
    """Warn of settings of an adapter that is off."""
    for key, lora in _adapters(cfg):
        if not lora.is_used and (changed := sorted(_changed_fields(lora))):
            yield (
                f"{key}.{changed[0]}={show(value_at(lora, changed[0]))} has no effect, because {key}.rank=0 turns the "
                f"adapter off; set {key}.rank=32, or remove {key}.{changed[0]}"
            )


def _changed_fields(section: Section) -> set[str]:
    """Return the names of the fields that differ from their defaults."""
    return {name for name, field in type(section).model_fields.items() if value_at(section, name) != field.default}


def interpreter_has_processes(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse an interpreter for environments that run in the trainer."""
    gym = cfg.environment.skyrl_gym
    if gym.python is not None and gym.isolation != "process":
        yield (
            f"environment.skyrl_gym.python={show(gym.python)} is used only by environments in separate processes, but "
            f"environment.skyrl_gym.isolation={gym.isolation} runs them in the trainer; set "
            "environment.skyrl_gym.isolation=process, or environment.skyrl_gym.python=null"
        )


def names_are_folders(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse names that are no safe name of a folder."""
    for key in ("trainer.project_name", "trainer.run_name"):
        name: str = value_at(cfg, key)
        if not name.isprintable() or any(part.strip() in (".", "..") for part in name.split("/")):
            yield f"{key}={show(name)} must be the name of a folder, in printable characters; try {key}=catch"


def _repeated_sources(sources: list[str]) -> Iterator[str]:
    """Yield each source that an earlier entry names too, possibly in another spelling of its path."""
    paths = [os.path.abspath(os.path.expandvars(os.path.expanduser(source))) for source in sources]
    return (source for index, source in enumerate(sources) if paths[index] in paths[:index])


def validation_data_is_read_once(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a validation source that is named twice."""
    for source in _repeated_sources(cfg.data.val_data):
        yield f"data.val_data has {show(source)} twice, so its rows would count twice; name it once"


def training_data_is_read_once(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of a training source that is named twice."""
    for source in _repeated_sources(cfg.data.train_data):
        yield f"data.train_data has {show(source)} twice, so an epoch trains on its rows twice; name it once"


def resume_path_is_a_checkpoint(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse `resume_mode=from_path` without the path of one checkpoint."""
    if cfg.trainer.resume_mode != "from_path":
        return
    path = cfg.trainer.resume_path
    if path is None:
        yield (
            "trainer.resume_mode=from_path needs trainer.resume_path=null to be a folder ending in global_step_<N>; "
            "set it, or trainer.resume_mode=latest"
        )
    elif not re.search(r"(^|/)global_step_\d+/?$", path):
        yield (
            f"trainer.resume_path={show(path)} must end in global_step_<N>; "
            f"try trainer.resume_path={path.rstrip('/')}/global_step_10, or trainer.resume_mode=latest"
        )


def _url_problems(key: str, url: str | None) -> Iterator[str]:
    if url is not None and not re.match(r"[a-z0-9+.-]+://.", url):
        yield f"{key}={show(url)} must be a URL, e.g. {key}=s3://my-bucket, or null to upload nothing"


def checkpoints_are_uploaded(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse remote storage that is no URL, or without checkpoints."""
    url = cfg.trainer.remote_ckpt_url
    yield from _url_problems("trainer.remote_ckpt_url", url)
    if url is not None and cfg.trainer.ckpt_interval < 0:
        yield (
            f"trainer.remote_ckpt_url={show(url)} needs checkpoints, but trainer.ckpt_interval=-1 writes none; set "
            "trainer.ckpt_interval=10, or trainer.remote_ckpt_url=null"
        )


def trajectories_are_uploaded(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse storage of trajectories that is no URL, or without trajectories."""
    url = cfg.trainer.remote_trajectory_url
    yield from _url_problems("trainer.remote_trajectory_url", url)
    if url is not None and not cfg.trainer.dump_eval_results:
        yield (
            f"trainer.remote_trajectory_url={show(url)} uploads what trainer.dump_eval_results=false does not write; "
            "set trainer.dump_eval_results=true"
        )


def resume_path_is_read(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of a path that `resume_mode` ignores."""
    if cfg.trainer.resume_path is not None and cfg.trainer.resume_mode != "from_path":
        yield (
            f"trainer.resume_path={show(cfg.trainer.resume_path)} is not read when "
            f"trainer.resume_mode={cfg.trainer.resume_mode}; set trainer.resume_mode=from_path"
        )


def wandb_can_start(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse Weights & Biases without its package or a login, before the models are loaded."""
    if "wandb" not in cfg.trainer.logger:
        return
    if find_spec("wandb") is None:
        yield "trainer.logger=wandb needs the package wandb; pip install wandb, or set trainer.logger=tensorboard"
    elif problem := wandb_login_problem(os.environ):
        yield problem


def artifacts_have_a_run(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse artifacts of Weights & Biases without it."""
    if cfg.trainer.wandb_artifacts and "wandb" not in cfg.trainer.logger:
        yield (
            f"trainer.wandb_artifacts=true needs wandb in trainer.logger={show(cfg.trainer.logger)}; add it, or set "
            "trainer.wandb_artifacts=false"
        )


def wandb_login_problem(environ: Mapping[str, str]) -> str | None:
    """Return None if there is a key, a `wandb login`, or a mode that needs neither; else a sentence on how to log in.

    Reads only `environ` and the netrc file.
    """
    mode = environ.get("WANDB_MODE", "").lower()
    if mode in MODES_WITHOUT_LOGIN or environ.get("WANDB_API_KEY") or _netrc_login(environ):
        return None
    return (
        "trainer.logger=wandb needs a login, and the variable WANDB_API_KEY is not set; do one of: "
        "export WANDB_API_KEY=<your key>, run `wandb login`, export WANDB_MODE=offline (no upload), "
        "or choose trainer.logger=tensorboard"
    )


def _netrc_login(environ: Mapping[str, str]) -> bool:
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "")) / ".netrc")
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False


def group_filters(cfg: SkyRLConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the filters of groups of equal rewards that are on: key, value, and the value that turns it off."""
    algorithm = cfg.trainer.algorithm
    if algorithm.dynamic_sampling.type is not None:
        yield "trainer.algorithm.dynamic_sampling.type", algorithm.dynamic_sampling.type, "null"
    if algorithm.zero_variance_filter:
        yield "trainer.algorithm.zero_variance_filter", "true", "false"


def distillation_has_a_teacher(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a teacher that is the policy itself, or becomes it."""
    estimator = "trainer.algorithm.advantage_estimator=on_policy_distillation"
    if cfg.trainer.algorithm.advantage_estimator != "on_policy_distillation":
        return
    teacher, student = cfg.trainer.ref.model.path, cfg.trainer.policy.model.path
    if teacher == student:
        yield (
            f"{estimator} learns from trainer.ref.model.path={show(teacher)}, which is "
            f"trainer.policy.model.path={show(student)} itself; set trainer.ref.model.path=<the teacher>"
        )
    if cfg.trainer.update_ref_every_epoch:
        yield (
            f"trainer.update_ref_every_epoch=true would replace the teacher of {estimator} by the policy; set "
            "trainer.update_ref_every_epoch=false"
        )


def filter_has_a_group(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse to compare the rewards of a group of one."""
    for key, value, off in group_filters(cfg):
        if cfg.generator.n_samples_per_prompt == 1:
            yield (
                f"{key}={value} compares the rewards of one prompt's samples, and generator.n_samples_per_prompt=1 "
                f"leaves nothing to compare; try generator.n_samples_per_prompt=5, or {key}={off}"
            )


def kl_in_reward_is_possible(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a KL penalty in the reward that would count twice, not at all, or without its gradient."""
    algorithm = cfg.trainer.algorithm
    if not algorithm.use_kl_in_reward:
        return
    if algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true would count the KL "
            "divergence twice; set one of them to false"
        )
    estimator = algorithm.kl_estimator_type
    if estimator.endswith("+"):
        yield (
            f"trainer.algorithm.kl_estimator_type={estimator} differs from {estimator[:-1]} only in its gradient, "
            "which trainer.algorithm.use_kl_in_reward=true does not use; set "
            f"trainer.algorithm.kl_estimator_type={estimator[:-1]}"
        )


def kl_settings_have_a_kl_term(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse settings of a KL term that is off, or that has no weight to adapt."""
    algorithm = cfg.trainer.algorithm
    is_adaptive = algorithm.kl_ctrl.type == "adaptive"
    if is_adaptive and not algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive controls the KL penalty in the reward, but "
            "trainer.algorithm.use_kl_in_reward=false disables it; set "
            "trainer.algorithm.use_kl_in_reward=true and trainer.algorithm.use_kl_loss=false, or "
            "trainer.algorithm.kl_ctrl.type=fixed"
        )
    if is_adaptive and algorithm.kl_loss_coef == 0:
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive multiplies trainer.algorithm.kl_loss_coef=0.0, which stays 0; try "
            "trainer.algorithm.kl_loss_coef=0.001"
        )
    if algorithm.use_bias_correction_kl and not algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_bias_correction_kl=true weighs the KL loss, but "
            "trainer.algorithm.use_kl_loss=false disables it; set trainer.algorithm.use_kl_loss=true, or "
            "trainer.algorithm.use_bias_correction_kl=false"
        )


def intervals_are_not_empty(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse an interval whose lower end is not below its upper end, and one of token ratios with a single end."""
    keys = [f"{CORRECTION}.token_mask_is_threshold_{end}" for end in ("low", "high")]
    values = [value_at(cfg, key) for key in keys]
    if values.count(None) == 1:
        missing = values.index(None)
        yield (
            f"{keys[missing]}=null must be set too when {keys[1 - missing]}={show(values[1 - missing])}: tokens are "
            f"left out on both sides; set {keys[missing]}={(0.5, 2.0)[missing]}, or {keys[1 - missing]}=null"
        )
    for low_key, high_key in INTERVALS:
        low, high = value_at(cfg, low_key), value_at(cfg, high_key)
        if low is not None and high is not None and low >= high:
            yield (
                f"{low_key}={low} must be below {high_key}={high}, or nothing lies between them; lower the first or "
                "raise the second"
            )


def bounds_leave_room(cfg: SkyRLConfig) -> Iterator[str]:
    """Refuse a second clip that bounds what the first one lets pass, and a buffer that punishes every response."""
    algorithm, longest = cfg.trainer.algorithm, cfg.generator.sampling_params.max_generate_length
    first, buffer = 1 + algorithm.eps_clip_high, algorithm.overlong_buffer_len
    if algorithm.policy_loss_type == "dual_clip" and algorithm.clip_ratio_c <= first:
        yield (
            f"trainer.algorithm.clip_ratio_c={algorithm.clip_ratio_c} must be above {first:g}, i.e. 1 plus "
            f"trainer.algorithm.eps_clip_high={algorithm.eps_clip_high}; otherwise trainer.algorithm.policy_loss_type="
            f"dual_clip clips inside the range of PPO; try trainer.algorithm.clip_ratio_c={first + 2:g}"
        )
    if buffer is not None and buffer >= longest:
        fixes = [f"trainer.algorithm.overlong_buffer_len={n}" for n in ([longest // 4 or 1] if longest > 1 else [])]
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} must be below "
            f"generator.sampling_params.max_generate_length={longest}, or every response is punished for its length; "
            f"try {' or '.join([*fixes, 'trainer.algorithm.overlong_buffer_len=null'])}"
        )


def rewards_are_compared(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of groups of one, of filters without effect, and of truncation that zeroes nearly every reward."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    if generator.n_samples_per_prompt == 1 and algorithm.advantage_estimator == "grpo":
        yield (
            "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every "
            "trajectory with itself only; try generator.n_samples_per_prompt=5"
        )
    if algorithm.dynamic_sampling.type == "filter" and algorithm.zero_variance_filter:
        yield (
            "trainer.algorithm.zero_variance_filter=true has no effect, because "
            "trainer.algorithm.dynamic_sampling.type=filter already drops groups of equal rewards; remove one of them"
        )
    for name, effect in (
        ("zero_reward_on_non_stop", "nearly every reward becomes 0"),
        ("apply_overlong_filtering", "nearly every trajectory is left out of the loss"),
    ):
        if getattr(generator, name) and generator.sampling_params.max_generate_length == 1:
            yield (
                f"generator.{name}=true keeps replies that end with the EOS token, but almost none does with "
                f"generator.sampling_params.max_generate_length=1: {effect}; set "
                f"generator.{name}=false"
            )


def loss_learns_from_rewards(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of a loss that ignores rewards, and of a KL loss whose gradient is 0 on average."""
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type == "cross_entropy":
        yield (
            "trainer.algorithm.policy_loss_type=cross_entropy imitates every rollout, whatever its reward; try "
            "trainer.algorithm.policy_loss_type=policy_gradient"
        )
    if algorithm.use_kl_loss and algorithm.kl_estimator_type == "k1" and not algorithm.use_bias_correction_kl:
        yield (
            "trainer.algorithm.kl_estimator_type=k1 with trainer.algorithm.use_kl_loss=true has a gradient of 0 on "
            "average, which is noise; try trainer.algorithm.kl_estimator_type=k1+ or k3"
        )


def sampling_is_unusual(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of copies of a greedy reply, of temperatures that sample noise, and of very short time limits."""
    generator, gym = cfg.generator, cfg.environment.skyrl_gym
    n_samples = generator.eval_n_samples_per_prompt
    if n_samples > 1 and generator.eval_sampling_params.temperature == 0:
        yield (
            f"generator.eval_n_samples_per_prompt={n_samples} samples the same greedy reply {n_samples} times, because "
            "generator.eval_sampling_params.temperature=0.0; try generator.eval_sampling_params.temperature=1.0, or "
            "generator.eval_n_samples_per_prompt=1"
        )
    for key in ("generator.sampling_params.temperature", "generator.eval_sampling_params.temperature"):
        if (temperature := value_at(cfg, key)) > UNUSUAL_TEMPERATURE:
            yield f"{key}={temperature:g} samples nearly at random; try {key}=1.0"
    limits = {
        "environment.skyrl_gym.call_timeout_seconds": gym.call_timeout_seconds,
        "generator.trajectory_timeout_seconds": generator.trajectory_timeout_seconds,
    }
    for key, seconds in limits.items():
        if seconds is not None and seconds < UNUSUAL_TIMEOUT_S:
            yield f"{key}={seconds:g} is so short that most rollouts may be invalid; try {key}=300"


def coefficients_are_unusual(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn of coefficients far above usual values."""
    algorithm = cfg.trainer.algorithm
    coefficients = {
        "trainer.algorithm.kl_loss_coef": algorithm.kl_loss_coef if algorithm.compares_with_reference else 0.0,
        "trainer.algorithm.entropy_loss_coef": algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        "trainer.policy.optimizer_config.weight_decay": cfg.trainer.policy.optimizer_config.weight_decay,
    }
    for key, value in coefficients.items():
        if value > 1:
            yield f"{key}={value:g} is so large that rewards hardly matter; try {key}=0.01"


RULES: tuple[Rule, ...] = (
    training_has_prompts,
    evaluation_has_prompts,
    custom_dataset_is_complete,
    custom_reward_function_is_called,
    mini_batches_divide_batch,
    sequence_norm_has_a_length,
    training_temperature_is_positive,
    input_length_covers_prompts,
    launcher_starts_every_process,
    colocated_models_have_the_same_size,
    weights_have_a_transport,
    one_engine_is_enough,
    engine_fits_its_devices,
    servers_have_addresses,
    engine_has_its_options,
    sampling_lengths_are_ordered,
    warmup_is_set_once,
    weight_decay_shrinks_weights,
    adapters_are_possible,
    interpreter_has_processes,
    names_are_folders,
    validation_data_is_read_once,
    resume_path_is_a_checkpoint,
    checkpoints_are_uploaded,
    trajectories_are_uploaded,
    artifacts_have_a_run,
    distillation_has_a_teacher,
    filter_has_a_group,
    kl_in_reward_is_possible,
    kl_settings_have_a_kl_term,
    intervals_are_not_empty,
    bounds_leave_room,
)
"""Rules that read the configuration alone."""

MACHINE_RULES: tuple[Rule, ...] = (engine_is_installed, ray_is_installed, sharding_fits_ranks, wandb_can_start)
"""Rules that read the machine too: only a run checks them, a report about a finished run does not."""

WARNINGS: tuple[Rule, ...] = (
    rewards_are_compared,
    loss_learns_from_rewards,
    adapters_are_on,
    resume_path_is_read,
    training_data_is_read_once,
    sampling_is_unusual,
    coefficients_are_unusual,
)
"""Warnings of settings that are allowed, but most likely not meant."""


def find_problems(cfg: Section, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Return the sentences of every rule that a configuration breaks."""
    return [sentence for rule in rules for sentence in rule(cfg)]
