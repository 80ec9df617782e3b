"""Rules for the inference engine and sampling."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

from skyrl_train.config.base import value_at
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.config.root import SkyRLConfig


def lengths_are_ordered(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject an input limit below the prompts' (or not equal, for one turn), and `min_tokens` above the maximum."""
    n_prompt, n_input = cfg.trainer.max_prompt_length, cfg.generator.max_input_length
    if n_input is not None and cfg.generator.max_turns == 1 and n_input != n_prompt:
        yield (
            f"generator.max_input_length={n_input} must equal trainer.max_prompt_length={n_prompt} when "
            f"generator.max_turns=1; try generator.max_input_length={n_prompt}, or null"
        )
    elif n_input is not None and n_input < n_prompt:
        yield (
            f"generator.max_input_length={n_input} must be at least trainer.max_prompt_length={n_prompt}; "
            f"try generator.max_input_length={n_prompt} or more, or null for the model's context length"
        )
    for key in ("generator.sampling_params", "generator.eval_sampling_params"):
        sampling = value_at(cfg, key)
        if sampling.min_tokens > sampling.max_generate_length:
            yield (
                f"{key}.min_tokens={sampling.min_tokens} must be at most "
                f"{key}.max_generate_length={sampling.max_generate_length}; try {key}.min_tokens=0"
            )


def weights_have_a_transport(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a transport that cannot reach the engines, and delta syncs between GPUs or without a receiver."""
    generator, placement = cfg.generator, cfg.trainer.placement
    backend = generator.weight_sync_backend
    if backend == "cuda_ipc" and not generator.run_engines_locally:
        yield (
            "generator.weight_sync_backend=cuda_ipc reaches only engines on the policy's GPUs, but "
            "generator.run_engines_locally=false uses servers; set generator.weight_sync_backend=auto"
        )
    elif backend == "cuda_ipc" and not placement.colocate_all:
        yield (
            "generator.weight_sync_backend=cuda_ipc reaches only engines on the policy's GPUs, but "
            "trainer.placement.colocate_all=false reserves separate GPUs; set generator.weight_sync_backend=nccl, or "
            "trainer.placement.colocate_all=true"
        )
    if generator.weight_sync_delta and backend in ("nccl", "cuda_ipc"):
        yield (
            f"generator.weight_sync_delta=true compares weights in host memory, but "
            f"generator.weight_sync_backend={backend} sends them from GPU to GPU; set "
            "generator.weight_sync_backend=auto, or generator.weight_sync_delta=false"
        )
    has_servers = not generator.run_engines_locally and not generator.engine.reads_files
    has_receivers = placement.uses_ray or has_servers or cfg.has_engine_process
    if generator.weight_sync_delta and not has_receivers:
        yield (
            "generator.weight_sync_delta=true needs a separate receiving process, but this run has only one process; "
            "set generator.weight_sync_delta=false, or trainer.placement.launcher=ray"
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


def engines_have_devices(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject several engines in one process, and engines that do not fit on the policy's GPUs."""
    generator, placement = cfg.generator, cfg.trainer.placement
    n_engines, size = generator.num_inference_engines, generator.n_devices_per_engine
    n_nodes, n_per_node = placement.size("policy")
    if not generator.run_engines_locally:
        return
    key, shared = f"generator.num_inference_engines={n_engines}", f"the policy's {n_nodes} × {n_per_node} GPUs"
    sharing = "share with trainer.placement.colocate_all=true"
    if not placement.uses_ray:
        if n_engines > 1:
            yield (
                f"{key} needs Ray, which starts a process for each engine; set generator.num_inference_engines=1, or "
                "trainer.placement.launcher=ray"
            )
    elif not placement.colocate_all or n_engines <= (n_fitting := n_nodes * (n_per_node // size)):
        return
    elif size == 1:
        yield (
            f"{key} is more than one engine on each of {shared}, which they {sharing}; try "
            f"generator.num_inference_engines={n_fitting}, or set trainer.placement.colocate_all=false"
        )
    elif n_fitting:
        yield (
            f"{key} of {size} GPUs each do not fit on {shared}, which they {sharing}: {n_per_node // size} of them fit "
            f"on a node; try generator.num_inference_engines={n_fitting}, or set trainer.placement.colocate_all=false"
        )
    else:
        sizes = " × ".join(f"{name}={value_at(cfg, name)}" for name in ENGINE_SIZES if value_at(cfg, name) > 1)
        yield (
            f"{sizes}: an engine of {size} GPUs does not fit on one node with {shared} (nodes × GPUs), which they "
            f"{sharing}; try {n_per_node} or less, trainer.placement.policy_num_gpus_per_node={size}, or set "
            "trainer.placement.colocate_all=false"
        )


def engines_use_all_devices(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about policy GPUs that no engine uses."""
    generator, placement = cfg.generator, cfg.trainer.placement
    n_nodes, n_per_node = placement.size("policy")
    n_engines, n_fitting = generator.n_local_engines, n_nodes * (n_per_node // generator.n_devices_per_engine)
    if placement.uses_ray and placement.colocate_all and 0 < n_engines < n_fitting:
        n_idle = n_nodes * n_per_node - n_engines * generator.n_devices_per_engine
        yield (
            f"generator.num_inference_engines={n_engines} leaves {n_idle} of the policy's {n_nodes} × {n_per_node} "
            f"GPUs (nodes × GPUs) idle during rollouts; set generator.num_inference_engines={n_fitting}"
        )


def engine_fits_its_devices(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject an engine on more devices than it can use."""
    generator, placement = cfg.generator, cfg.trainer.placement
    for key in ENGINE_SIZES:
        if (size := value_at(cfg, key)) == 1 or not generator.run_engines_locally:
            continue
        if generator.engine.is_embedded:
            yield (
                f"{key}={size} needs an engine on several devices, but generator.backend={generator.backend} is the "
                f"embedded engine, which uses one; set {key}=1, or generator.backend=vllm"
            )
        elif generator.engine.needs_ray_for_several_devices and not placement.uses_ray:
            yield (
                f"{key}={size} needs an engine on several devices, but without Ray, {generator.engine.label} uses one; "
                f"set {key}=1, or trainer.placement.policy_num_gpus_per_node={generator.n_devices_per_engine}, so that "
                "it shares the policy's GPUs"
            )


def servers_can_be_used(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject missing, unused or repeated addresses, engines without a client, and options that only servers set."""
    generator = cfg.generator
    urls = generator.remote_inference_engine_urls
    if generator.run_engines_locally:
        if urls:
            yield (
                f"generator.remote_inference_engine_urls={show(urls)} is ignored when "
                "generator.run_engines_locally=true; set generator.run_engines_locally=false, or remove it"
            )
        return
    if not urls:
        yield (
            "generator.remote_inference_engine_urls=[] is empty, but generator.run_engines_locally=false needs one "
            "address per server; set generator.remote_inference_engine_urls=[127.0.0.1:8000]"
        )
    elif len(urls) != generator.num_inference_engines:
        yield (
            f"generator.num_inference_engines={generator.num_inference_engines} does not match the {len(urls)} servers "
            f"in generator.remote_inference_engine_urls={show(urls)}; set generator.num_inference_engines={len(urls)}"
        )
    if len(set(urls)) < len(urls):
        yield (
            f"generator.remote_inference_engine_urls={show(urls)} lists a server twice; remove the duplicate and lower "
            "generator.num_inference_engines"
        )
    if generator.engine.connect is None:
        yield (
            f"generator.backend={generator.backend} cannot connect to a server; set generator.backend=vllm or "
            "generator.backend=sglang"
        )
    options = {key: value_at(cfg, key) for key in SERVER_OPTIONS if value_at(cfg, key) != FIELDS[key].get_default()}
    if kwargs := generator.engine_options:
        options["generator.engine_init_kwargs"] = kwargs
    for key, value in options.items():
        yield (
            f"{key}={show(value)} applies only to engines that the run starts, but "
            f"generator.run_engines_locally=false uses a running server; remove {key} and pass it to the server"
        )


def experts_can_be_replayed(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject router replay where experts are not recorded or not replayed."""
    key, trainer, generator = "trainer.algorithm.router_replay", cfg.trainer, cfg.generator
    if not trainer.algorithm.router_replay:
        return
    if not generator.engine.records_experts:
        yield (
            f"{key}=true needs an engine that reports the experts of tokens, and generator.backend="
            f"{generator.backend} does not; set generator.backend=hf, or {key}=false"
        )
    name = generator.chat_template.name_or_path
    if name is not None and generator.use_conversation_multi_turn and not generator.step_wise_trajectories:
        yield (
            f"{key}=true needs the sampled tokens, but generator.chat_template.name_or_path={show(name)} tokenizes "
            f"each finished conversation again; remove it, or set {key}=false"
        )
    if trainer.strategy_traits.is_model_parallel:
        yield f"{key}=true needs trainer.strategy=fsdp2, not {trainer.strategy}; set it, or {key}=false"
    if (size := trainer.policy.sequence_parallel_size) > 1:
        yield (
            f"{key}=true replays whole rows, but trainer.policy.sequence_parallel_size={size} splits them; set "
            f"trainer.policy.sequence_parallel_size=1, or {key}=false"
        )


def sampling_has_log_probs(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject sampling without the policy's log-probs, and a choice of sampler for engines that have only one."""
    generator = cfg.generator
    sampler = generator.vllm.sampler
    if sampler != "auto" and not generator.engine.has_samplers:
        yield (
            f"generator.vllm.sampler={sampler} is a setting of vLLM, but generator.backend={generator.backend}; remove "
            "it, or set generator.backend=vllm"
        )
    engine, other = f"generator.backend={generator.backend}", "generator.backend=vllm"
    if generator.engine.has_samplers:
        engine, other = f"generator.vllm.sampler={sampler}", "generator.vllm.sampler=seeded"
    if generator.engine.reports_only_own_logprobs or (generator.engine.has_samplers and sampler == "native"):
        for key, value in generator.unscored_sampling().items():
            yield f"{engine} reports no log-probs of the policy with {key}={show(value)}; remove {key}, or set {other}"


def engine_has_its_options(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject options that the embedded engine lacks."""
    generator = cfg.generator
    if not generator.engine.is_embedded:
        return
    if kwargs := generator.engine_options:
        yield (
            f"generator.engine_init_kwargs={show(kwargs)} are options for vLLM or SGLang, but "
            f"generator.backend={generator.backend} is the embedded engine; remove them, or set generator.backend=vllm"
        )
    for name, allowed, reason in (
        ("enforce_eager", True, "captures no CUDA graphs"),
        ("enable_prefix_caching", True, "keeps a session's keys and values until it ends"),
        ("enable_chunked_prefill", True, "always reads long prompts in several steps"),
    ):
        if getattr(generator, name) != allowed:
            yield (
                f"generator.{name}={show(not allowed)} has no effect, because generator.backend={generator.backend} is "
                f"the embedded engine, which {reason}; set generator.{name}={show(allowed)}, or generator.backend=vllm"
            )


def engine_is_installed(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject an engine whose package is missing."""
    backend, engine = cfg.generator.backend, cfg.generator.engine
    if engine.package is not None and cfg.generator.run_engines_locally and find_spec(engine.package) is None:
        yield (
            f"generator.backend={backend} needs {engine.label}, which is not installed; run uv sync --extra {backend} "
            "in skyrl-train/ (docs/start/install.md), or set generator.backend=auto for the embedded engine"
        )


def conversation_has_one_mode(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject conversation settings that have no effect in the run's mode."""
    generator = cfg.generator
    if generator.step_wise_trajectories:
        for name in ("use_conversation_multi_turn", "append_eos_token_after_stop_str_in_multi_turn"):
            if not value_at(generator, name):
                yield (
                    f"generator.{name}=false has no effect with generator.step_wise_trajectories=true, where the chat "
                    f"template renders every turn; set generator.{name}=true, or generator.step_wise_trajectories=false"
                )
    elif generator.merge_stepwise_output:
        yield (
            "generator.merge_stepwise_output=true joins the rows of generator.step_wise_trajectories, which is false; "
            "set generator.step_wise_trajectories=true, or generator.merge_stepwise_output=false"
        )


def sampling_is_unusual(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about repeated greedy samples, high temperatures, escaped stop strings and very short time limits."""
    generator, gym = cfg.generator, cfg.environment.skyrl_gym
    n_samples = generator.eval_n_samples_per_prompt
    if n_samples > 1 and generator.eval_sampling_params.temperature == 0:
        yield (
            f"generator.eval_n_samples_per_prompt={n_samples} samples the same greedy reply {n_samples} times, because "
            "generator.eval_sampling_params.temperature=0.0; try generator.eval_sampling_params.temperature=1.0, or "
            "generator.eval_n_samples_per_prompt=1"
        )
    for key in ("generator.sampling_params.temperature", "generator.eval_sampling_params.temperature"):
        if (temperature := value_at(cfg, key)) > 3:
            yield f"{key}={temperature:g} samples nearly at random; try {key}=1.0"
    for key in ("generator.sampling_params.stop", "generator.eval_sampling_params.stop"):
        if escaped := [stop for stop in value_at(cfg, key) or () if re.search(r"\\[nrt]", stop)]:
            yield (
                f"{key}={show(escaped)} ends a reply at a backslash and a letter, since the command line has no "
                'escapes; for a line end, write "\\n" in the YAML file of --config'
            )
    limits = {
        "environment.skyrl_gym.call_timeout_seconds": gym.call_timeout_seconds,
        "generator.trajectory_timeout_seconds": generator.trajectory_timeout_seconds,
    }
    for key, seconds in limits.items():
        if seconds is not None and seconds < 1:
            yield f"{key}={seconds:g} is so short that most rollouts may be invalid; try {key}=300"
