"""Command line of a run with a Tinker service."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TinkerOptions:
    """Options of a run. Options with the name of a `generator.*` key have its meaning.

    Subclasses add options (numbers or strings), change defaults and extend `settings`. A field with `init=False` is not
    an option, so set it in `__post_init__`.

    max_sequence_length: maximum tokens of prompt and response. Longer sequences are truncated and not trained on.
    tokenizer: folder or name of the tokenizer. Defaults to the model's.
    """

    train_data: str
    eval_data: str = ""
    model_name: str
    tokenizer: str = ""
    batch_size: int = 8
    eval_batch_size: int = 32
    learning_rate: float = 4e-5
    lora_rank: int = 16
    max_steps: int = 200
    max_turns: int = 1
    max_generate_length: int = 2048
    max_input_length: int = 30720
    max_sequence_length: int = 32768
    n_samples_per_prompt: int = 4
    eval_every: int = 20
    save_every: int = 10
    seed: int = 42
    project_name: str = "skyrl"
    run_name: str = "tinker"
    output_dir: str = "outputs"
    logger: str = "wandb"

    def __post_init__(self) -> None:
        """Raise ConfigError for a number that is not positive, or lengths that do not fit."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "seed" and value <= 0:
                raise ConfigError(f"--{field.name}={value} must be above 0")
        if self.max_sequence_length < self.max_input_length:
            raise ConfigError(
                f"--max_sequence_length={self.max_sequence_length} must be at least --max_input_length="
                f"{self.max_input_length}, or every long rollout is left out of training"
            )

    def config(self) -> SkyRLConfig:
        """Return the configuration of generator and evaluations, or raise ConfigError for settings that do not fit."""
        return load_config(self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the configuration keys that differ from their defaults, nested."""
        sampling = {"max_generate_length": self.max_generate_length, "temperature": 1.0}
        return {
            "data": {"train_data": [self.train_data], "val_data": [self.eval_data] if self.eval_data else []},
            "trainer": {
                "project_name": self.project_name,
                "run_name": self.run_name,
                "output_dir": self.output_dir,
                "seed": self.seed,
                "eval_interval": self.eval_every if self.eval_data else -1,
                "train_batch_size": self.batch_size,
                "policy_mini_batch_size": self.batch_size,
                "eval_batch_size": self.eval_batch_size,
                "max_prompt_length": self.max_input_length,
            },
            "generator": {
                "n_samples_per_prompt": self.n_samples_per_prompt,
                "max_turns": self.max_turns,
                "max_input_length": self.max_input_length,
                "sampling_params": dict(sampling),
                "eval_sampling_params": dict(sampling),
            },
        }


Options = TypeVar("Options", bound=TinkerOptions)


def parse_options(
    options_class: type[Options], argv: Sequence[str] | None, description: str, prog: str | None = None
) -> Options:
    """Parse `--option value …`, by default from the process's arguments. ConfigError if values do not fit.

    `prog` is the command in the help text, by default the name of the script.
    """
    parser = argparse.ArgumentParser(prog, None, description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    types = get_type_hints(options_class)
    for field in (field for field in fields(options_class) if field.init):
        required = field.default is MISSING
        default = None if required else field.default
        parser.add_argument(
            f"--{field.name}", type=types[field.name], required=required, default=default, help=" ", metavar="VALUE"
        )
    return options_class(**vars(parser.parse_args(argv)))
