from dataclasses import dataclass

import pytest

from skyrl_agent.integrations.tinker.options import TinkerOptions, parse_options
from skyrl_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AgentOptions(TinkerOptions):
    """Options of a subclass: a required one, one with a default, and a changed default."""

    agent: str
    max_seconds: float = 60
    max_turns: int = 20


ARGV = ["--train_data", "a.parquet", "--model_name", "m", "--agent", "a.yaml"]


def test_names_and_defaults_are_those_of_the_generator() -> None:
    options = TinkerOptions(train_data="a.parquet", model_name="m", max_turns=3)
    assert (options.max_input_length, options.max_generate_length, options.max_sequence_length) == (30720, 2048, 32768)
    cfg = options.config()
    assert (cfg.generator.max_turns, cfg.generator.max_input_length) == (3, 30720)
    assert cfg.generator.sampling_params.max_generate_length == 2048
    assert cfg.trainer.eval_interval == -1


def test_invalid_options_name_the_argument() -> None:
    with pytest.raises(ConfigError, match="--max_sequence_length=100 must be at least"):
        TinkerOptions(train_data="a", model_name="m", max_sequence_length=100)
    with pytest.raises(ConfigError, match="--batch_size=0 must be above 0"):
        TinkerOptions(train_data="a", model_name="m", batch_size=0)
    with pytest.raises(ConfigError, match=r"--max_seconds=-1.0 must be above 0"):
        parse_options(AgentOptions, [*ARGV, "--max_seconds=-1"], "")


def test_the_command_line_has_the_options_of_the_subclass(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(AgentOptions, [*ARGV, "--max_seconds", "1.5"], "Train an agent")
    assert options == AgentOptions(train_data="a.parquet", model_name="m", agent="a.yaml", max_seconds=1.5)
    assert options.config().generator.max_turns == 20
    with pytest.raises(SystemExit):
        parse_options(AgentOptions, ARGV[:4], "Train an agent")
    assert "required: --agent" in capsys.readouterr().err
