"""The whole configuration: `data.*`, `trainer.*`, `generator.*` and `environment.*`."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Field

from skyrl_train.config.base import Allowed, FreeValue, OptionalCount, Section, StringList, Text
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.trainer import TrainerConfig

REWARD_FUNCTION_ENV = "reward_function"
"""The environment that calls `custom_reward_function`."""

ENV_DEFAULTS = {"llm_as_a_judge": {"model": "gpt-4o-mini", "base_url": None}}
"""Default settings of environments in SkyRL scripts that expect them to be set, by environment class."""


class MixtureConfig(Section):
    """Mixing of data sources in each batch. Without these keys, all training prompts are shuffled together."""

    weights: Annotated[dict[str, Annotated[float, Ge(0)]], Allowed("a section of data_source=weight")] = Field(
        default={}
    )
    """Relative weight of each `data_source`, e.g. `data.mixture.weights={gsm8k:3,search:1}`. Epochs are counted per
    source. Defaults to each source's number of prompts, if one of the other keys is set."""

    min_per_batch: Annotated[int, Ge(0)] = 0
    """Minimum number of prompts of each data source in every batch."""

    curriculum: Text | None = None
    """`module:function` that adapts the weights. After each step, `function(step, weights, metrics)` returns the
    weights for the next prompts to draw. `metrics` has keys such as `reward/search/avg_raw_reward`. The new weights
    apply to the next step or, with `trainer.fully_async`, to the step `max_staleness_steps` + 1 later."""

    @property
    def is_used(self) -> bool:
        """True if batches are mixed by data source."""
        return bool(self.weights) or self.min_per_batch > 0 or self.curriculum is not None


class CustomDatasetConfig(Section):
    """A dataset class of your own, with `__len__` and a `__getitem__` that returns a row. It is constructed once for
    training and once for evaluation, as `name(data_files=…, tokenizer=…, processor=None, config=…, max_samples=-1)`,
    plus `split="train"` or `"validation"` if it accepts `split`."""

    path: Text | None = None
    """Python file that defines the class. Rows are read when they are drawn."""

    name: Text | None = None
    """Name of the class, e.g. `DynamicEnvDataset`."""

    config: Annotated[dict[str, FreeValue], Allowed("a section of options")] = Field(default={})
    """Options for the class, e.g. `data.custom_cls.config.adapter_config.num_tasks_per_case=200`. The class reads them
    from `config.custom_cls.config`."""


class DataConfig(Section):
    """Training and evaluation prompts."""

    train_data: StringList = Field(default=["$HOME/data/gsm8k/train.parquet"])
    """Training prompts: parquet, json or jsonl files, or Hugging Face datasets (`owner/name:split` or
    `owner/name/config:split`, by default the split `train`). A single string is a list of one. `$HOME` and `~` are
    expanded when the file is read."""

    val_data: StringList = Field(default=["$HOME/data/gsm8k/validation.parquet"])
    """Evaluation prompts, in the same format as `train_data`. Metrics are reported per `data_source`. An empty list
    disables evaluation."""

    max_checked_rows: OptionalCount = 20_000
    """Number of training rows to check before training, sampled at random if there are more. null checks all. Remaining
    rows are checked when they are drawn, and skipped if they are invalid or if their prompt is longer than
    `trainer.max_prompt_length`. Validation data is always checked completely."""

    mixture: MixtureConfig = MixtureConfig()
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()


class SkyRLGymConfig(Section):
    """Environment calls, plus one free-form section per environment class, passed to the environment unchanged:
    `environment.skyrl_gym.search.topk=3` reaches environments of class `search` as `{"topk": 3}`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, FreeValue]] = Field(init=False)

    max_env_workers: Annotated[int, Ge(0)] = 32
    """Maximum number of threads or processes for environment calls. 0 calls environments inline, without a time
    limit."""

    call_timeout_seconds: Annotated[float, Gt(0)] | None = 300.0
    """Time limit of an environment call, in seconds. A call that exceeds it is abandoned, and its rollout is invalid
    (`env_timeout`). null leaves only `trainer.watchdog.limit_seconds`."""

    isolation: Literal["thread", "process"] = "thread"
    """`process` runs each environment in a separate worker process, at most `max_env_workers` at once. Workers that
    hang are killed, and a crash affects only its own environment. `thread` is faster, but cannot kill a call that
    hangs."""

    python: Text | None = None
    """Python interpreter for environments with `isolation=process`. Defaults to the trainer's."""

    def env_config(self, env_class: str) -> dict[str, Any]:
        """Return the settings of an environment class, or {}. `my_module:MyEnv` reads the section `MyEnv`."""
        name = env_class.rpartition(":")[2]
        return {**ENV_DEFAULTS.get(name, {}), **(self.model_extra or {}).get(name, {})}


class EnvironmentConfig(Section):
    """The environment and its settings."""

    env_class: Text = "gsm8k"
    """Environment of dataset rows without `env_class`."""

    imports: StringList = Field(default=[])
    """Modules to import before anything is checked, because they register environments, estimators or losses. With a
    function, as in `examples.catch.main_catch:register_catch`, the function is called once."""

    skyrl_gym: SkyRLGymConfig = SkyRLGymConfig()


class CustomRewardFunctionConfig(Section):
    """A reward function of your own, called for each reply as
    `name(data_source=…, solution_str=…, ground_truth=…, extra_info=…)`. All rows then use the environment
    `reward_function`. If the function raises, the rollout is invalid."""

    path: Text | None = None
    """Python file that defines the function."""

    name: Text = "compute_score"
    """Name of the function. It returns a number, or a dict with `score` and extra numbers to log as metrics."""


class SkyRLConfig(Section):
    """The typed configuration of a run, as returned by `load_config`."""

    data: DataConfig = DataConfig()
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()

    def engine_dtype(self, *, has_gpu: bool) -> Literal["float32", "bfloat16"]:
        """Return the dtype of the engine's weights. On GPUs with `trainer.bf16`, vLLM and SGLang use bfloat16."""
        is_cast = not self.generator.engine.is_embedded and self.trainer.bf16 and has_gpu
        return "bfloat16" if is_cast else self.trainer.policy.model.dtype

    @property
    def has_engine_process(self) -> bool:
        """True if the run trains in this process and sends the weights to an engine in a second process."""
        trainer, generator = self.trainer, self.generator
        if not trainer.fully_async.enabled or trainer.placement.uses_ray:
            return False
        return generator.run_engines_locally and not generator.engine.reads_files

    def offloads_idle(self, *, has_gpus: bool) -> bool:
        """Return True if idle models and engines are offloaded from the devices they share."""
        if self.trainer.fully_async.enabled:  # both are busy all the time
            return False
        has_copy = self.trainer.placement.uses_ray or not self.generator.engine.is_embedded
        return has_copy and self.generator.n_local_engines > 0 and self.trainer.placement.offloads_idle(has_gpus)
