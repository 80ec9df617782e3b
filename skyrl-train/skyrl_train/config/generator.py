"""`generator.*`: the inference engine, sampling and the agent loop."""

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Field

from skyrl_train.config.backends import EMBEDDED, ENGINES, EngineTraits, check_engine
from skyrl_train.config.base import (
    Allowed,
    Count,
    CountOrMinusOne,
    FreeValue,
    OptionalCount,
    OptionalStringList,
    Resolved,
    Section,
    StringList,
    Text,
    TokenIdList,
    resolved_later,
)

EngineName = Annotated[str, AfterValidator(check_engine), Allowed(f"one of {', '.join(['auto', *ENGINES])}")]
Temperature = Annotated[float, Ge(0), Le(100)]
RESHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
"""Sampling settings that change the distribution beyond its temperature."""

Sampler = Literal["native", "seeded"]
NATIVE_TEMPERATURES = (0.01, 2.0)
"""The limits of vLLM's sampler. It raises lower temperatures to the minimum, except 0, and rejects higher ones."""

SyncCheck = Annotated[
    Literal["auto", "off", "checksum", "logprobs"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads off as false
    Allowed("one of auto, off, checksum, logprobs"),
]


class SamplingConfig(Section):
    """Sampling of training rollouts."""

    max_generate_length: Count = 1024
    """Maximum number of new tokens per turn."""

    temperature: Temperature = 1.0
    """Sampling temperature. 0 is greedy."""

    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least this."""

    top_k: CountOrMinusOne = -1
    """Sample from this many most likely tokens. -1 samples from all."""

    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Never sample tokens whose probability is below this fraction of the maximum."""

    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Divide positive logits of tokens already in the prompt or response by this, and multiply negative logits by
    it."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the response."""

    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the response, once per occurrence."""

    min_tokens: Annotated[int, Ge(0)] = 0
    """Minimum number of new tokens per turn."""

    logprobs: Annotated[int, Ge(0), Le(0), Allowed("0")] | None = 0
    """No effect. The engine always returns the log-prob of each sampled token."""

    stop: OptionalStringList = None
    """Strings that end a turn. A single string is a list of one."""

    stop_token_ids: TokenIdList = Field(default=[])
    """Ids of tokens that end a turn, in addition to the EOS token."""


class EvalSamplingConfig(SamplingConfig):
    """Sampling of evaluation rollouts."""

    max_generate_length: Resolved[Count] = resolved_later()
    """Maximum number of new tokens per turn. Defaults to `generator.sampling_params.max_generate_length`."""

    temperature: Temperature = 0.0


class ChatTemplateConfig(Section):
    """Chat template to use instead of the tokenizer's."""

    source: Literal["name", "file"] = "name"
    """`name` picks a built-in template, `file` loads a Jinja file."""

    name_or_path: Text | None = None
    """`qwen3_with_thinking`, `qwen3_without_thinking`, or the path of a Jinja file. The conversation is then rendered
    again before each turn, and the template's `generation` blocks mark the trained tokens. Defaults to the tokenizer's
    template."""


class VLLMConfig(Section):
    """Settings of vLLM that `engine_init_kwargs` cannot express."""

    sampler: Literal["auto", Sampler] = "auto"
    """Who chooses the tokens. `native` is vLLM's own sampler, with asynchronous scheduling and the current model runner
    on GPUs. It cannot be seeded. It rejects temperatures above 2 and between 0 and 0.01, and `top_p`, `top_k`, `min_p`,
    penalties and `min_tokens`, for which vLLM would report log-probs of another distribution than the policy's.
    `seeded` is ours: the same seed gives the same tokens in any batch and in the embedded engine, and every sampling
    setting works. `auto` is `native` on GPUs if no sampling setting forbids it, else `seeded`. For running servers,
    `auto` is the sampler that the server was started for."""


class RewardModelConfig(Section):
    """Reward model that scores finished rollouts. Its score is the reward component `reward_model`."""

    path: Text | None = None
    """Sequence-classification model with one label and the policy's tokenizer, or a LoRA adapter of one, such as an
    export of `skyrl reward`. Its score times `reward_weights.reward_model` is added to the environment's reward. To
    train on this score alone, use the environment `reply`. The model runs in the generator's process, on its first GPU,
    if any. null disables it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights."""

    max_tokens_per_batch: Count = 16384
    """Maximum number of tokens per batch of scored rollouts. A longer rollout is scored alone."""


class GeneratorConfig(Section):
    """The inference engine and the agent loop."""

    backend: EngineName = "auto"
    """`hf` is the embedded engine, which generates with the policy's tensors. `vllm` and `sglang` keep a separate copy
    of the weights, and must be installed unless `run_engines_locally=false`. `auto` currently means the embedded
    engine."""

    run_engines_locally: bool = True
    """Start the engines with the run. `false` uses the running servers in `remote_inference_engine_urls`."""

    remote_inference_engine_urls: StringList = Field(default=[])
    """Addresses of running vLLM or SGLang servers, e.g. `[10.0.0.5:8000]`, for `run_engines_locally=false`. Their
    number must equal `num_inference_engines`."""

    num_inference_engines: Count = 1
    """Number of engines, each with a copy of the weights. All turns of a trajectory stay on the same engine. More than
    one needs Ray or running servers. With Ray, each engine uses different policy GPUs, or separate GPUs with
    `trainer.placement.colocate_all=false`."""

    engine_start_timeout_seconds: Annotated[float, Gt(0), Le(1e6)] = 600.0
    """Maximum number of seconds for an engine process to load its model, including one that replaces a lost engine, and
    for a lost server to come back."""

    inference_engine_tensor_parallel_size: Count = 1
    """Tensor-parallel size of a vLLM or SGLang engine. All GPUs of an engine must be on one node."""

    inference_engine_pipeline_parallel_size: Count = 1
    """Pipeline-parallel size of a vLLM or SGLang engine."""

    inference_engine_data_parallel_size: Count = 1
    """Data-parallel size of a vLLM or SGLang engine: number of model copies that share its requests, each on separate
    GPUs."""

    weight_sync_backend: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"
    """How new weights reach engines in other processes. On GPUs, `auto` and `nccl` use CUDA IPC for engines on the
    policy's GPUs (`trainer.placement.colocate_all=true`) and NCCL for all other engines. `cuda_ipc` always uses CUDA
    IPC. On CPUs, all three use shared memory on the node of the policy's first rank and gloo elsewhere. `shm` and
    `gloo` force one transport for all engines. For running servers, `auto` uses shared memory and gloo even on GPUs. A
    run in one process sends weights only to vLLM servers and, with `trainer.fully_async`, to its engine."""

    weight_transfer_threshold_cuda_ipc_GB: Annotated[float, Gt(0)] = 1.0
    """Size of the buffer on each GPU through which CUDA IPC sends weights piece by piece, in GB (10⁹ bytes)."""

    weight_sync_check: SyncCheck = "auto"
    """Check after each weight sync that ends the run on a mismatch. `checksum` compares all values that were copied to
    another process. `logprobs` also has the engine sample 32 tokens and the policy score them: their difference is
    `sync/logprob_gap`. `auto` is `logprobs`, or `off` if the engine generates with the policy's tensors. In
    fully asynchronous runs whose rollouts continue during a sync (`trainer.fully_async.in_flight_weight_updates`),
    `auto` samples only after the first one, because later samples would have to wait for these rollouts."""

    weight_sync_tolerance: Annotated[float, Gt(0)] | None = None
    """Maximum `sync/logprob_gap`, in nats. Defaults to 0.001 in float32 and 0.1 in bfloat16."""

    weight_sync_delta: bool = False
    """Send only the values that changed since the last weight sync, if that is smaller. Saves network traffic but costs
    memory, because the policy's first rank and vLLM and SGLang engines each keep an extra copy of the weights."""

    weight_sync_timeout_seconds: Annotated[float, Gt(0)] = 300.0
    """Maximum number of seconds that a weight sync waits for a process. With several policy ranks, it must be at least
    30 s below `$SKYRL_WORKER_NCCL_TIMEOUT_IN_S` (default 600), the time that ranks wait for each other."""

    async_engine: bool = True
    """No effect. Engines are always asynchronous."""

    batched: bool = False
    """Run the turns of all trajectories in a batch synchronously. No effect if environments run in separate
    processes. `false` lets each trajectory proceed independently."""

    n_samples_per_prompt: Count = 5
    """Number of trajectories per training prompt. They form one group."""

    eval_n_samples_per_prompt: Count = 1
    """Number of trajectories per evaluation prompt."""

    success_reward: float | None = None
    """Minimum total reward of a trajectory that `pass_at_k` counts as a success, e.g. 1. Defaults to any reward above
    0, including partial credit. Does not affect training."""

    max_turns: Count = 1
    """Maximum number of turns of a trajectory. Longer trajectories end with stop reason `max_turns`. Environments
    receive it as `extras["max_turns"]`."""

    max_response_length: OptionalCount = None
    """Maximum number of tokens of a trajectory after its prompt, including observations. The turn that reaches it is
    truncated (stop reason `length`). null sets no limit."""

    use_conversation_multi_turn: bool = True
    """Make each turn a separate assistant message. `false` puts all turns in one assistant message, with the
    observations between them as plain text."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the template's end-of-turn token to a turn that ended at a stop string. The token is not trained on."""

    chat_template: ChatTemplateConfig = ChatTemplateConfig()

    chat_template_kwargs: Annotated[dict[str, FreeValue], Allowed("a section of template variables")] = Field(
        default={}
    )
    """Arguments of the chat template, e.g. `chat_template_kwargs.enable_thinking=false`."""

    step_wise_trajectories: bool = False
    """Store each turn as a separate row, with the history as the template renders it. Advantages and loss weights treat
    the rows of a trajectory as one. Sequence-level losses and corrections treat each row separately."""

    merge_stepwise_output: bool = False
    """With `step_wise_trajectories`, extend the previous row if a turn's prompt starts with all tokens so far."""

    inject_context_status: bool = False
    """Append the number of used context tokens and turns to each observation."""

    reward_functions: StringList = Field(default=[])
    """Names of reward functions (`register_reward_function`) whose rewards are added to the environment's reward."""

    reward_model: RewardModelConfig = RewardModelConfig()

    reward_weights: Annotated[dict[str, float], Allowed("a section of component=weight")] = Field(default={})
    """Weight of each named reward component. Defaults to 1 for each. If an environment reports components and any of
    them has a weight here, their weighted sum replaces the turn's reward."""

    n_rollout_retries: Annotated[int, Ge(0)] = 1
    """Number of retries of a failed rollout before it counts as invalid. Each retry gets a fresh environment."""

    trajectory_timeout_seconds: Annotated[float, Gt(0)] | None = None
    """Time limit of a rollout in seconds, after which it is invalid (`trajectory_timeout`). Time spent waiting for the
    engine counts, but time spent waiting for an environment's process does not. null sets no limit, except for agents
    of the HTTP endpoint."""

    max_input_length: OptionalCount = None
    """Maximum number of input tokens of a turn. If the next turn's input would be longer, the trajectory ends with stop
    reason `length`. Defaults to `trainer.max_prompt_length` if `max_turns=1`, else the model's context length."""

    zero_reward_on_non_stop: bool = False
    """Set all rewards of a trajectory to 0 unless its last turn ended with stop reason `stop`."""

    apply_overlong_filtering: bool = False
    """Exclude trajectories whose last turn was truncated (`length`) from the loss. Their rewards still count in the
    group baseline (DAPO)."""

    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.8
    """Fraction of the memory left by weights, gradients and optimizer state that the engine may use for its KV cache
    and vLLM's copy of the weights. With `trainer.placement.offload_idle`, only the policy's weights are subtracted
    first."""

    max_num_seqs: Count = 1024
    """Maximum number of sequences that the engine decodes at once."""

    max_num_batched_tokens: Count = 8192
    """Maximum number of tokens per engine step. Each running sequence takes one, and the rest, but at least 64, goes to
    new prompts."""

    enforce_eager: bool = True
    """Run the model without CUDA graphs."""

    enable_prefix_caching: bool = True
    """Keep keys and values of finished requests, to reuse them in requests that start with the same tokens."""

    enable_chunked_prefill: bool = True
    """Split the prefill of long prompts into several steps, alongside the decoding of other requests."""

    engine_init_kwargs: Annotated[dict[str, FreeValue], Allowed("a section of engine options")] = Field(default={})
    """Extra options for vLLM (fields of `EngineArgs`) or SGLang (fields of `ServerArgs`), e.g.
    `engine_init_kwargs.block_size=32`. They override the keys above. `engine_init_kwargs.chat_template=<file>` replaces
    the tokenizer's chat template."""

    vllm: VLLMConfig = VLLMConfig()
    sampling_params: SamplingConfig = SamplingConfig()
    eval_sampling_params: EvalSamplingConfig = EvalSamplingConfig()

    @property
    def engine(self) -> EngineTraits:
        """The traits of `backend`."""
        return ENGINES[EMBEDDED if self.backend == "auto" else self.backend]

    def choose_sampler(self, *, has_gpu: bool) -> Sampler:
        """Resolve `vllm.sampler` for engines that the run starts."""
        if self.vllm.sampler != "auto":
            return self.vllm.sampler
        return "native" if has_gpu and not self.unscored_sampling() else "seeded"

    def unscored_sampling(self) -> dict[str, Any]:
        """Return the settings, by key, with which vLLM's own sampler and SGLang lack the policy's log-probs."""
        sections = {"sampling_params": self.sampling_params, "eval_sampling_params": self.eval_sampling_params}
        settings = {
            f"generator.{key}.{name}": value
            for key, section in sections.items()
            for name in RESHAPING
            if (value := getattr(section, name)) != type(section).model_fields[name].default
        }
        temperatures = {f"generator.{key}.temperature": section.temperature for key, section in sections.items()}
        low, high = NATIVE_TEMPERATURES if self.engine.has_samplers else (0.0, math.inf)
        return settings | {key: value for key, value in temperatures.items() if value and not low <= value <= high}

    @property
    def engine_options(self) -> dict[str, Any]:
        """`engine_init_kwargs` without `chat_template`, a tokenizer setting."""
        return {name: value for name, value in self.engine_init_kwargs.items() if name != "chat_template"}

    @property
    def n_local_engines(self) -> int:
        """Number of engines that the run starts."""
        return self.num_inference_engines if self.run_engines_locally else 0

    @property
    def n_devices_per_engine(self) -> int:
        """Number of GPUs per engine."""
        return (
            self.inference_engine_tensor_parallel_size
            * self.inference_engine_pipeline_parallel_size
            * self.inference_engine_data_parallel_size
        )
