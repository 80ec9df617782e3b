"""`generator.*`: sampling of rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field

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

Temperature = Annotated[float, Ge(0), Le(100)]
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
    """Logits are divided by this before sampling; 0 takes the most likely token."""

    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the smallest set of tokens with at least this much probability."""

    top_k: CountOrMinusOne = -1
    """Sample from this many most likely tokens; -1 from all."""

    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Leave out tokens less likely than this fraction of the most likely one."""

    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Positive logits of tokens in the prompt or the response so far are divided by this, negative ones multiplied."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the response so far."""

    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the response so far, once per occurrence."""

    min_tokens: Annotated[int, Ge(0)] = 0
    """Minimum number of new tokens per turn."""

    logprobs: Annotated[int, Ge(0), Le(0), Allowed("0")] | None = 0
    """The engine always returns the log-prob of each sampled token; 0 and null have no effect."""

    stop: OptionalStringList = None
    """Strings that end a turn. A single string is a list of one."""

    stop_token_ids: TokenIdList = Field(default=[])
    """Tokens that end a turn, besides the EOS token."""


class EvalSamplingConfig(SamplingConfig):
    """Sampling of evaluation rollouts."""

    max_generate_length: Resolved[Count] = resolved_later()
    """Maximum number of new tokens per turn; null takes `generator.sampling_params.max_generate_length`."""

    temperature: Temperature = 0.0
    """Logits are divided by this before sampling; 0 takes the most likely token."""


class ChatTemplateConfig(Section):
    """A chat template in place of the tokenizer's."""

    source: Literal["name", "file"] = "name"
    """`name`: a template of this package; `file`: your own file."""

    name_or_path: Text | None = None
    """`qwen3_with_thinking`, `qwen3_without_thinking`, or the path of a Jinja file. With one, conversations are
    rendered again before each turn, and the template's `generation` blocks mark the trained tokens. null takes the
    tokenizer's."""


class RewardModelConfig(Section):
    """A reward model that scores finished rollouts, as the component `reward_model` of their reward."""

    path: Text | None = None
    """A model for sequence classification with one label and the policy's tokenizer, or an adapter of one, e.g. an
    export of `skyrl reward`; null scores nothing. Its score is added to the environment's reward, times
    `reward_weights.reward_model`. The environment `reply` has no reward of its own. The model computes in the process
    of the generator, on its first GPU if it has one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""

    max_tokens_per_batch: Count = 16384
    """Maximum number of tokens that are scored at once; a longer rollout is scored alone."""


class GeneratorConfig(Section):
    """The inference engine and the agent loop."""

    backend: Literal["auto", "hf", "vllm", "sglang"] = "auto"
    """`hf` is the embedded engine, which generates with the policy's own tensors; `vllm` and `sglang` have copies, and
    must be installed unless other programs run their servers. In this version, `auto` is the embedded engine."""

    run_engines_locally: bool = True
    """true: the run starts its engine. false: it uses the servers of `remote_inference_engine_urls`."""

    remote_inference_engine_urls: StringList = Field(default=[])
    """Addresses of running servers of vLLM or SGLang, e.g. `[10.0.0.5:8000]`, for `run_engines_locally=false`: one for
    each of the `num_inference_engines`."""

    num_inference_engines: Count = 1
    """Number of engines, each with a copy of the weights. The turns of a trajectory stay on one of them. Several need
    Ray, where they are on different GPUs of the policy, or on GPUs of their own with
    `trainer.placement.colocate_all=false`; or several servers."""

    engine_start_timeout_seconds: Annotated[float, Gt(0), Le(1e6)] = 600.0
    """Maximum time that an engine in another process may take to load its model, also one that replaces a lost engine,
    and that a lost server of `remote_inference_engine_urls` may take to return."""

    inference_engine_tensor_parallel_size: Count = 1
    """Number of GPUs that share each layer of an engine of vLLM or SGLang. All GPUs of an engine are on one node."""

    inference_engine_pipeline_parallel_size: Count = 1
    """Number of groups of GPUs that divide the layers of an engine among them."""

    inference_engine_data_parallel_size: Count = 1
    """Number of copies of the model in an engine, each on GPUs of its own, between which it divides its requests."""

    weight_sync_backend: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"
    """Transport of new weights to other processes. On GPUs, `auto` and `nccl` take CUDA IPC for engines on the GPUs of
    the policy (`trainer.placement.colocate_all=true`), and NCCL for engines on others; `cuda_ipc` takes CUDA IPC. On
    CPUs, all three take shared memory for processes on the node of the policy's first rank, and gloo for the others;
    `shm` and `gloo` take one of them for all. `auto` does the same on GPUs for running servers. A run in one process
    sends weights to servers of vLLM only, and with `trainer.fully_async` to its engine."""

    weight_transfer_threshold_cuda_ipc_GB: Annotated[float, Gt(0)] = 1.0
    """Memory of each GPU, in units of 10⁹ bytes, through which CUDA IPC sends weights in pieces."""

    weight_sync_check: SyncCheck = "auto"
    """Check after each weight sync. `checksum` compares all values that were copied to another process. `logprobs` also
    lets the engine sample 32 tokens, which the policy scores: `sync/logprob_gap`. A difference ends the run. `auto` is
    `logprobs`, unless the engine generates with the policy's own tensors. With `trainer.fully_async.enabled`, `auto`
    samples after the first sync only, because later the tokens would wait for rollouts in progress."""

    weight_sync_tolerance: Annotated[float, Gt(0)] | None = None
    """Maximum of `sync/logprob_gap`, in nats; null is 0.001 in float32 and 0.1 in bfloat16."""

    weight_sync_delta: bool = False
    """Send only the values that changed since the last weight sync, where that is shorter. The policy's first rank
    keeps a copy of the weights, and so do engines of vLLM and SGLang."""

    weight_sync_timeout_seconds: Annotated[float, Gt(0)] = 300.0
    """Maximum time that a process may keep a weight sync waiting. If the policy has several ranks, it must be at least
    30 s less than `$SKYRL_WORKER_NCCL_TIMEOUT_IN_S` (600), the time for which ranks wait for each other."""

    async_engine: bool = True
    """No effect: engines are always asynchronous."""

    batched: bool = False
    """true: all trajectories of a batch take their turns synchronously, unless environments run in separate processes;
    false: each trajectory proceeds independently."""

    n_samples_per_prompt: Count = 5
    """Trajectories per training prompt, which form one group."""

    eval_n_samples_per_prompt: Count = 1
    """Trajectories per evaluation prompt."""

    success_reward: float | None = None
    """Minimum total reward of a success in `pass_at_k`, e.g. 1. Defaults to any reward above 0, partial credit
    included. Does not affect training."""

    max_turns: Count = 1
    """Maximum number of turns of a trajectory, which then ends with stop reason `max_turns`. Environments receive it as
    `extras["max_turns"]`."""

    max_response_length: OptionalCount = None
    """Maximum number of tokens of a trajectory after its prompt, observations included; the turn that reaches it is
    truncated (`length`)."""

    use_conversation_multi_turn: bool = True
    """true: each turn is an assistant message. false: all turns are one assistant message, with observations as plain
    text inside."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the template's end-of-turn token, which is not trained, to a turn that ended at a stop string."""

    chat_template: ChatTemplateConfig = ChatTemplateConfig()
    """A chat template in place of the tokenizer's."""

    chat_template_kwargs: Annotated[dict[str, FreeValue], Allowed("a section of variables of the template")] = Field(
        default={}
    )
    """Arguments of the chat template, e.g. `chat_template_kwargs.enable_thinking=false`."""

    step_wise_trajectories: bool = False
    """Each turn is a separate row, with the history that the template renders before it. Advantages and the weights of
    the loss treat the rows of a trajectory as one; losses with one ratio per trajectory, and the corrections of whole
    trajectories, treat each row as one."""

    merge_stepwise_output: bool = False
    """With `step_wise_trajectories`, a turn whose prompt begins with all tokens so far extends the previous row."""

    inject_context_status: bool = False
    """Append the used context length and number of turns to each observation."""

    reward_functions: StringList = Field(default=[])
    """Registered reward functions (`register_reward_function`) to add to the rewards of environments."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """A reward model that scores finished rollouts."""

    reward_weights: Annotated[dict[str, float], Allowed("a section of component=weight")] = Field(default={})
    """Weights of the named components of the reward, 1 by default. If an environment reports components, and any of
    them has a weight here, their weighted sum replaces the reward of a turn."""

    n_rollout_retries: Annotated[int, Ge(0)] = 1
    """Number of retries of a failed rollout, each with a fresh environment, before it counts as invalid."""

    trajectory_timeout_seconds: Annotated[float, Gt(0)] | None = None
    """A rollout that takes longer is invalid (`trajectory_timeout`). Waiting for the engine counts; waiting for an
    environment's process does not."""

    max_input_length: OptionalCount = None
    """A trajectory whose input for the next turn is longer, in tokens, ends with stop reason `length`. null takes
    `trainer.max_prompt_length` when `max_turns=1`, else the model's context length."""

    zero_reward_on_non_stop: bool = False
    """Set all rewards of a trajectory to 0 unless its last turn ended with the stop reason `stop`."""

    apply_overlong_filtering: bool = False
    """Leave trajectories whose last turn was truncated (`length`) out of the loss; their rewards still count in the
    baseline of their group (DAPO)."""

    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.8
    """Fraction of the memory beyond weights, gradients and optimizer state that the engine takes: for the KV cache, and
    vLLM's copy of the weights. If models leave their devices while the engine generates
    (`trainer.placement.offload_idle`), it is a fraction of the memory beyond the policy's weights."""

    max_num_seqs: Count = 1024
    """Maximum number of sequences that the engine decodes at once."""

    max_num_batched_tokens: Count = 8192
    """Maximum number of tokens in one engine step: one per running sequence; the rest, but at least 64, for new
    prompts."""

    enforce_eager: bool = True
    """Run the model without CUDA graphs."""

    enable_prefix_caching: bool = True
    """Keep keys and values of finished requests for requests that begin with the same tokens."""

    enable_chunked_prefill: bool = True
    """Read long prompts in several steps, beside the decoding of other requests."""

    engine_init_kwargs: Annotated[dict[str, FreeValue], Allowed("a section of options of the engine")] = Field(
        default={}
    )
    """Further options of vLLM (fields of its `EngineArgs`) or SGLang (of its `ServerArgs`), e.g.
    `engine_init_kwargs.block_size=32`. They override the keys above. `engine_init_kwargs.chat_template=<file>` replaces
    the chat template of the tokenizer."""

    sampling_params: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""

    eval_sampling_params: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of evaluation rollouts."""

    @property
    def n_local_engines(self) -> int:
        """Number of engines that the run starts."""
        return self.num_inference_engines if self.run_engines_locally else 0

    @property
    def n_devices_per_engine(self) -> int:
        """Number of GPUs of each engine."""
        return (
            self.inference_engine_tensor_parallel_size
            * self.inference_engine_pipeline_parallel_size
            * self.inference_engine_data_parallel_size
        )
