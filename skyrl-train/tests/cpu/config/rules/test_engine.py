from train_kit.rules import SERVER, RuleContract, load

from skyrl_train.config.rules import engine

BACKEND = "generator.backend"


class TestEngine(RuleContract):
    module = engine
    tested_elsewhere = ("engine_is_installed",)


def test_a_chat_template_is_no_option_of_an_engine() -> None:
    load("generator.engine_init_kwargs.chat_template=x.jinja")
    load(f"{SERVER} generator.engine_init_kwargs.chat_template=x.jinja")


def test_rollouts_may_be_batched_in_any_form() -> None:
    load("generator.batched=true generator.max_turns=5")
    load(f"generator.async_engine=false generator.batched=false {BACKEND}=vllm")
