"""Every rule that depends on the configured estimator and loss: what it reports, and the nearest it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rule_coverage import (
    ALGORITHM,
    CORRECTION,
    KL_IN_REWARD,
    ONE_SAMPLE,
    PARTS,
    TEACHER,
    Case,
    estimator,
    loss,
    sentences_of,
    sentences_seen,
)

from skyrl_train.algorithms import register_advantage_estimator, register_policy_loss, rules
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.algorithms.rules import ALGORITHM_RULES, ALGORITHM_WARNINGS, reads_reference
from skyrl_train.config import SkyRLConfig, load_config, validate_cfg
from skyrl_train.config.validation import WARNINGS as CONFIG_WARNINGS
from skyrl_train.config.validation import find_problems
from skyrl_train.errors import ConfigError

NO_KL = "trainer.algorithm.use_kl_loss=false"
CRITIC = "trainer.critic.model.path=tiny"
SEQUENCE_MEAN = f"{ALGORITHM}.loss_reduction=sequence_mean"
ESTIMATORS = {name: ADVANTAGE_ESTIMATORS.traits(name) for name in ADVANTAGE_ESTIMATORS.list_available()}
LOSSES = {name: POLICY_LOSSES.traits(name) for name in POLICY_LOSSES.list_available()}
CRITIC_OF = {"gae": CRITIC, "gae_per_turn": CRITIC}
Tensors = tuple[torch.Tensor, torch.Tensor]


def load(overrides: list[str]) -> SkyRLConfig:
    return validate_cfg(OmegaConf.from_dotlist(overrides), ALGORITHM_RULES)


def warnings(overrides: list[str]) -> list[str]:
    cfg = load(overrides)
    return find_problems(cfg, CONFIG_WARNINGS + ALGORITHM_WARNINGS)


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return str(caught.value)


REF_GPUS = "trainer.placement.ref_num_gpus_per_node=2"
REF_NODES = "trainer.placement.ref_num_nodes=2"
APART = "trainer.placement.colocate_all=false"

PROBLEMS: list[Case] = [
    (
        [REF_GPUS],
        f"{REF_GPUS} must equal trainer.placement.policy_num_gpus_per_node=1 with trainer.placement.colocate_all=true; "
        "remove it, or set trainer.placement.colocate_all=false",
        [
            [REF_GPUS, "trainer.placement.policy_num_gpus_per_node=2"],
            [REF_GPUS, NO_KL],
            [REF_GPUS, "trainer.policy.model.lora.rank=4"],
        ],
    ),
    (
        [REF_NODES, APART],
        f"{REF_NODES} must equal trainer.placement.policy_num_nodes=1 with trainer.placement.colocate_policy_ref=true; "
        "remove it, or set trainer.placement.colocate_policy_ref=false",
        [[REF_NODES, APART, "trainer.placement.colocate_policy_ref=false"]],
    ),
    (
        [estimator("gae"), "trainer.policy.model.path=my/model"],
        "trainer.algorithm.advantage_estimator=gae reads the values of a critic, and trainer.critic.model.path=null "
        "trains none; set trainer.critic.model.path=my/model, or trainer.algorithm.advantage_estimator=grpo",
        [[estimator("gae"), CRITIC], [estimator("gae_per_turn"), CRITIC], [estimator("reinforce++")]],
    ),
    (
        [estimator("rloo"), ONE_SAMPLE],
        "trainer.algorithm.advantage_estimator=rloo compares the samples of one prompt, but "
        "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
        "trainer.algorithm.advantage_estimator=reinforce++",
        [
            [estimator("rloo"), "generator.n_samples_per_prompt=2"],
            [estimator("grpo"), ONE_SAMPLE],
            [estimator("reinforce++"), ONE_SAMPLE],
            [estimator("remax"), ONE_SAMPLE],
            [estimator("gae"), CRITIC, ONE_SAMPLE],
            [estimator("on_policy_distillation"), TEACHER, ONE_SAMPLE],
            [estimator("mine"), ONE_SAMPLE],
        ],
    ),
    (
        [f"{ALGORITHM}.dynamic_sampling.type=replace", estimator("on_policy_distillation"), TEACHER],
        "trainer.algorithm.dynamic_sampling.type=replace leaves groups of equal rewards out, but "
        "trainer.algorithm.advantage_estimator=on_policy_distillation compares no rewards and learns as much from "
        "them; set trainer.algorithm.dynamic_sampling.type=null",
        [
            [f"{ALGORITHM}.dynamic_sampling.type=replace", estimator("grpo")],
            [f"{ALGORITHM}.dynamic_sampling.type=filter", estimator("mine")],
            [f"{ALGORITHM}.dynamic_sampling.type=filter", estimator("reinforce++")],
        ],
    ),
    (
        [f"{ALGORITHM}.zero_variance_filter=true", estimator("token_rewards")],
        "trainer.algorithm.zero_variance_filter=true leaves groups of equal rewards out, but "
        "trainer.algorithm.advantage_estimator=token_rewards compares no rewards and learns as much from them; set "
        "trainer.algorithm.zero_variance_filter=false",
        [[estimator("token_rewards")], [f"{ALGORITHM}.zero_variance_filter=true", estimator("gae"), CRITIC]],
    ),
    (
        [loss("gmpo"), estimator("grpo_per_turn")],
        "trainer.algorithm.policy_loss_type=gmpo takes one advantage for each trajectory, and "
        "trainer.algorithm.advantage_estimator=grpo_per_turn gives each token its own; try "
        "trainer.algorithm.policy_loss_type=gspo or dual_clip, or trainer.algorithm.advantage_estimator=grpo",
        [
            [loss("gmpo"), estimator("rloo")],
            [loss("gmpo"), estimator("rloo"), *KL_IN_REWARD],
            [loss("vespo"), estimator("reinforce++-baseline")],
            [loss("gspo"), estimator("grpo_per_turn")],
            [loss("dual_clip"), estimator("gae"), CRITIC],
            [loss("mine"), estimator("gae"), CRITIC],
            [loss("gmpo"), estimator("mine")],
        ],
    ),
    (
        [*KL_IN_REWARD, estimator("gdpo")],
        "trainer.algorithm.use_kl_in_reward=true changes the rewards of tokens, which "
        "trainer.algorithm.advantage_estimator=gdpo does not read; set trainer.algorithm.use_kl_in_reward=false, and "
        "trainer.algorithm.use_kl_loss=true for a KL loss",
        [
            [*KL_IN_REWARD, estimator("token_rewards")],
            [*KL_IN_REWARD, estimator("mine")],
            [estimator("gdpo")],
        ],
    ),
    (
        ["trainer.update_ref_every_epoch=true", f"{ALGORITHM}.use_kl_loss=false"],
        "trainer.update_ref_every_epoch=true updates a reference that nothing reads, with "
        "trainer.algorithm.use_kl_loss=false and trainer.algorithm.use_kl_in_reward=false; set one of them to true, or "
        "trainer.update_ref_every_epoch=false",
        [
            ["trainer.update_ref_every_epoch=true"],
            ["trainer.update_ref_every_epoch=true", *KL_IN_REWARD],
            ["trainer.update_ref_every_epoch=true", f"{ALGORITHM}.use_kl_loss=false", estimator("mine")],
        ],
    ),
    (
        [f"{CORRECTION}.tis_ratio_type=token", loss("clip_cov")],
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token cannot go with "
        "trainer.algorithm.policy_loss_type=clip_cov, which chooses tokens by comparing them all, corrected or not; "
        "set trainer.algorithm.off_policy_correction.tis_ratio_type=null, or "
        "trainer.algorithm.policy_loss_type=dual_clip",
        [
            [f"{CORRECTION}.tis_ratio_type=token", loss("gspo")],
            [f"{CORRECTION}.tis_ratio_type=token", loss("mine")],
            [loss("clip_cov")],
            [f"{ALGORITHM}.off_policy_sequence_mask_threshold=0.1", loss("clip_cov")],
        ],
    ),
    (
        [f"{CORRECTION}.outlier_token_is_threshold_high=100", loss("dppo")],
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=100.0 cannot go with "
        "trainer.algorithm.policy_loss_type=dppo, which reads the engine's log-probs itself, so that they would count "
        "twice; set trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=null, or "
        "trainer.algorithm.policy_loss_type=dual_clip",
        [[loss("dppo")], [f"{CORRECTION}.token_tis_ratio_clip_high=3.0", loss("rollout_is")]],
    ),
]

ASYNC = "trainer.fully_async.enabled=true"
WARNINGS: list[Case] = [
    (
        [REF_GPUS, NO_KL],
        f"{REF_GPUS} has no effect, because the run has no reference; remove it",
        [[NO_KL], [REF_GPUS, APART, "trainer.placement.colocate_policy_ref=false"]],
    ),
    (
        [REF_GPUS, "trainer.policy.model.lora.rank=4"],
        f"{REF_GPUS} has no effect, because the reference is the policy without its adapter; remove it",
        [["trainer.policy.model.lora.rank=4"]],
    ),
    (
        [loss("gmpo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"],
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token weighs single tokens, and "
        "trainer.algorithm.policy_loss_type=gmpo has one ratio for all tokens of a trajectory; try "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence, or trainer.algorithm.policy_loss_type=gspo",
        [
            [loss("gmpo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=sequence"],
            [loss("gspo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"],
        ],
    ),
    (
        [ASYNC, "trainer.fully_async.max_staleness_steps=2"],
        "trainer.fully_async.max_staleness_steps=2 trains on rollouts of older weights, and "
        "trainer.algorithm.policy_loss_type=regular does not correct for that; set "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        [
            [ASYNC, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"],
            [ASYNC, loss("rollout_is")],
            [ASYNC, "trainer.fully_async.max_staleness_steps=0"],
        ],
    ),
    (
        [ASYNC, loss("gmpo"), SEQUENCE_MEAN],
        "trainer.fully_async.max_staleness_steps=4 trains on rollouts of older weights, and "
        "trainer.algorithm.policy_loss_type=gmpo does not correct for that; set "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
        [[ASYNC, loss("gmpo"), SEQUENCE_MEAN, f"{ALGORITHM}.off_policy_correction.tis_ratio_type=sequence"]],
    ),
    (
        [ASYNC, loss("clip_cov")],
        "trainer.fully_async.max_staleness_steps=4 trains on rollouts of older weights, and "
        "trainer.algorithm.policy_loss_type=clip_cov does not correct for that; set "
        "trainer.algorithm.policy_loss_type=rollout_is",
        [[loss("clip_cov")]],
    ),
    (
        [estimator("reinforce++"), f"{ALGORITHM}.dynamic_sampling.type=filter"],
        "trainer.algorithm.dynamic_sampling.type=filter leaves groups of equal total rewards out, from which "
        "trainer.algorithm.advantage_estimator=reinforce++ learns too; trainer.algorithm.dynamic_sampling.type=null "
        "keeps them",
        [[estimator("reinforce++")], [estimator("rloo"), f"{ALGORITHM}.dynamic_sampling.type=filter"]],
    ),
    (
        [estimator("remax"), f"{ALGORITHM}.zero_variance_filter=true"],
        "trainer.algorithm.zero_variance_filter=true leaves groups of equal total rewards out, from which "
        "trainer.algorithm.advantage_estimator=remax learns too; trainer.algorithm.zero_variance_filter=false keeps "
        "them",
        [[estimator("remax")], [estimator("mine"), f"{ALGORITHM}.zero_variance_filter=true"]],
    ),
    (
        [CRITIC],
        "trainer.critic.model.path=tiny trains a critic whose values trainer.algorithm.advantage_estimator=grpo does "
        "not read; set trainer.critic.model.path=null, or trainer.algorithm.advantage_estimator=gae",
        [[estimator("gae"), CRITIC], [estimator("gae_per_turn"), CRITIC], [CRITIC, estimator("mine")]],
    ),
    (
        [estimator("gdpo"), f"{ALGORITHM}.advantage_batch_normalize=true"],
        "trainer.algorithm.advantage_batch_normalize=true does what trainer.algorithm.advantage_estimator=gdpo has "
        "done already; set trainer.algorithm.advantage_batch_normalize=false",
        [[estimator("gdpo")], [estimator("rloo"), f"{ALGORITHM}.advantage_batch_normalize=true"]],
    ),
    (
        [loss("gspo")],
        "trainer.algorithm.policy_loss_type=gspo was published as a mean over trajectories, and "
        "trainer.algorithm.loss_reduction=token_mean weighs them otherwise; set "
        "trainer.algorithm.loss_reduction=sequence_mean",
        [[loss("gspo"), SEQUENCE_MEAN], [loss("cispo")], [loss("vespo")]],
    ),
    (
        [loss("cispo"), f"{ALGORITHM}.eps_clip_high=0.28"],
        "trainer.algorithm.eps_clip_high=0.28 is not read by trainer.algorithm.policy_loss_type=cispo; its settings "
        "are trainer.algorithm.cispo.cispo_eps_clip_low, trainer.algorithm.cispo.cispo_eps_clip_high",
        [
            [loss("cispo"), f"{ALGORITHM}.eps_clip_high=0.2"],
            [loss("regular"), f"{ALGORITHM}.eps_clip_high=0.28"],
            [loss("mine"), f"{ALGORITHM}.eps_clip_high=0.28"],
        ],
    ),
    (
        [loss("policy_gradient"), f"{ALGORITHM}.eps_clip_low=0.1"],
        "trainer.algorithm.eps_clip_low=0.1 is not read by trainer.algorithm.policy_loss_type=policy_gradient, "
        "which clips nothing",
        [[loss("dual_clip"), f"{ALGORITHM}.eps_clip_low=0.1"]],
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), [case[:2] for case in PROBLEMS])
def test_a_broken_rule_says_what_to_do(overrides: list[str], expected: str) -> None:
    assert refusal(overrides) == expected


@pytest.mark.parametrize("overrides", [accepted for case in PROBLEMS for accepted in case[2]])
def test_what_is_nearest_to_it_is_accepted(overrides: list[str]) -> None:
    load(overrides)


@pytest.mark.parametrize(("overrides", "expected"), [case[:2] for case in WARNINGS])
def test_a_warning_says_what_to_do(overrides: list[str], expected: str) -> None:
    assert warnings(overrides) == [expected]


@pytest.mark.parametrize("overrides", [quiet for case in WARNINGS for quiet in case[2]])
def test_what_is_nearest_to_it_is_quiet(overrides: list[str]) -> None:
    assert warnings(overrides) == []


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].compares_samples and name != "grpo"])
def test_no_estimator_compares_one_sample(name: str) -> None:
    assert f"advantage_estimator={name} compares the samples of one prompt" in refusal([estimator(name), ONE_SAMPLE])
    load([estimator(name)])


def test_the_advice_for_a_missing_critic_is_good_advice() -> None:
    fix = "trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct"
    assert fix in refusal([estimator("gae")])
    assert load([estimator("gae"), fix]).trainer.critic.model.path == fix.partition("=")[2]


@pytest.mark.parametrize("name", sorted(CRITIC_OF))
def test_no_estimator_reads_values_of_nobody(name: str) -> None:
    assert refusal([estimator(name)]).startswith(f"trainer.algorithm.advantage_estimator={name} reads the values")


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].per_token])
@pytest.mark.parametrize("of_sequence", [name for name in LOSSES if LOSSES[name].per_sequence])
def test_no_loss_of_a_sequence_gets_advantages_of_tokens(name: str, of_sequence: str) -> None:
    models = [CRITIC, TEACHER]
    assert "takes one advantage" in refusal([estimator(name), loss(of_sequence), *models])
    load([estimator(name), loss("dual_clip"), *models])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].compares == "nothing"])
@pytest.mark.parametrize(
    "switch", ["dynamic_sampling.type=filter", "dynamic_sampling.type=replace", "zero_variance_filter=true"]
)
def test_nothing_is_filtered_where_nothing_is_compared(name: str, switch: str) -> None:
    assert "compares no rewards" in refusal([estimator(name), TEACHER, f"{ALGORITHM}.{switch}"])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "dppo", "rollout_is"])
@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_the_correction_goes_with_a_loss_that_it_does_not_suit(name: str, part: str) -> None:
    correction = f"{CORRECTION}.{part}={PARTS[part]}"
    assert f"{correction} cannot go with {loss(name)}" in refusal([loss(name), correction])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].compares in ("baseline", "parts")])
def test_estimators_that_learn_from_equal_rewards(name: str) -> None:
    assert len(warnings([estimator(name), CRITIC_OF.get(name, TEACHER), f"{ALGORITHM}.zero_variance_filter=true"])) == 1


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].whitens])
def test_estimators_that_normalize(name: str) -> None:
    assert (
        len(warnings([estimator(name), CRITIC_OF.get(name, TEACHER), f"{ALGORITHM}.advantage_batch_normalize=true"]))
        == 1
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].loss_reduction])
@pytest.mark.parametrize("reduction", ["token_mean", "prompt_mean", "seq_mean_token_sum", "token_sum"])
def test_losses_that_are_means_over_sequences(name: str, reduction: str) -> None:
    assert len(warnings([loss(name), f"{ALGORITHM}.loss_reduction={reduction}"])) == 1
    assert not warnings([loss(name), SEQUENCE_MEAN])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_have_bounds_of_their_own(name: str) -> None:
    clips = [f"{ALGORITHM}.eps_clip_low=0.1", f"{ALGORITHM}.eps_clip_high=0.3"]
    n_about_clips = sum("is not read by" in sentence for sentence in warnings([loss(name), SEQUENCE_MEAN, *clips]))
    assert n_about_clips == (0 if LOSSES[name].reads_eps_clip else 2)


def test_every_sentence_was_seen() -> None:
    seen = [sentences_seen(ALGORITHM_RULES + ALGORITHM_WARNINGS, overrides) for overrides, *_ in PROBLEMS + WARNINGS]
    assert sentences_of(rules) <= set().union(*seen)


@pytest.fixture
def own() -> Iterator[None]:
    """What a test registers as `mine` is gone afterwards."""
    yield
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        if "mine" in registry.list_available():
            registry.unregister("mine")


def register_mean_baseline(**traits: Any) -> None:
    @register_advantage_estimator("mine", **traits)
    def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any) -> Tensors:
        scores = token_level_rewards.sum(dim=-1)
        means = [scores[[other == uid for other in index]].mean() for uid in index]
        advantages = (scores - torch.stack(means))[:, None] * response_mask
        return advantages, advantages


def register_discounted(**traits: Any) -> None:
    @register_advantage_estimator("mine", **traits)
    def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Tensors:
        returns = token_level_rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
        return returns - 0.5 * response_mask, returns


@pytest.mark.usefixtures("own")
class TestYourOwnEstimator:
    def test_that_compares_samples_needs_a_group(self) -> None:
        register_mean_baseline()
        assert "=mine compares the samples of one prompt" in refusal([estimator("mine"), ONE_SAMPLE])
        load([estimator("mine")])
        load([estimator("mine"), loss("gmpo"), SEQUENCE_MEAN])

    def test_with_advantages_of_tokens_takes_no_loss_of_trajectories(self) -> None:
        register_discounted()
        assert "=mine gives each token its own" in refusal([estimator("mine"), loss("gmpo")])
        load([estimator("mine"), ONE_SAMPLE])

    @pytest.mark.parametrize(
        ("traits", "overrides", "sentence"),
        [
            ({"compares": "samples"}, [ONE_SAMPLE], "compares the samples of one prompt"),
            ({"per_token": True}, [loss("gmpo"), SEQUENCE_MEAN], "takes one advantage for each trajectory"),
            ({"compares": "nothing"}, [f"{ALGORITHM}.zero_variance_filter=true"], "compares no rewards"),
        ],
    )
    def test_obeys_the_rules_of_the_traits_that_it_declares(
        self, traits: dict[str, Any], overrides: list[str], sentence: str
    ) -> None:
        @register_advantage_estimator("mine", **traits)
        def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Tensors:
            advantages = (token_level_rewards.sum() * response_mask).float()  # the same everywhere
            return advantages, advantages

        assert sentence in refusal([estimator("mine"), *overrides])
        ADVANTAGE_ESTIMATORS.unregister("mine")
        register_advantage_estimator("mine")(mine)
        load([estimator("mine"), *overrides])

    def test_that_requires_values_needs_a_critic(self) -> None:
        @register_advantage_estimator("mine")
        def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, values: torch.Tensor) -> Tensors:
            return (token_level_rewards - values) * response_mask, token_level_rewards

        assert refusal([estimator("mine")]).startswith(f"{estimator('mine')} reads the values of a critic")
        assert warnings([estimator("mine"), CRITIC]) == []

    def test_that_reads_no_values_makes_a_critic_useless(self) -> None:
        register_mean_baseline()
        (warning,) = warnings([estimator("mine"), CRITIC])
        assert f"a critic whose values {estimator('mine')} does not read" in warning

    @pytest.mark.parametrize("name", ["values", "kwargs"])
    def test_that_may_read_values_is_not_warned_of_a_critic(self, name: str) -> None:
        def named(token_level_rewards: torch.Tensor, values: torch.Tensor | None = None) -> Tensors:
            return token_level_rewards, token_level_rewards

        def any_input(token_level_rewards: torch.Tensor, **kwargs: Any) -> Tensors:
            return token_level_rewards, token_level_rewards

        register_advantage_estimator("mine")(named if name == "values" else any_input)
        assert warnings([estimator("mine"), CRITIC]) == []

    def test_that_requires_the_reference_has_one_to_update(self) -> None:
        updated = [estimator("mine"), NO_KL, "trainer.update_ref_every_epoch=true"]
        register_mean_baseline()
        assert "updates a reference that nothing reads" in refusal(updated)
        ADVANTAGE_ESTIMATORS.unregister("mine")

        @register_advantage_estimator("mine")
        def mine(token_level_rewards: torch.Tensor, ref_log_probs: torch.Tensor) -> Tensors:
            return token_level_rewards - ref_log_probs, token_level_rewards

        assert reads_reference(load(updated).trainer.algorithm)

    def test_that_can_do_without_the_reference_has_none_loaded(self) -> None:
        @register_advantage_estimator("mine")
        def mine(token_level_rewards: torch.Tensor, ref_log_probs: torch.Tensor | None = None) -> Tensors:
            return token_level_rewards, token_level_rewards

        assert not reads_reference(load([estimator("mine"), NO_KL]).trainer.algorithm)

    def test_that_reads_no_rewards_of_tokens_gets_no_penalty_in_them(self) -> None:
        @register_advantage_estimator("mine")
        def mine(response_mask: torch.Tensor, reward_components: dict[str, torch.Tensor]) -> Tensors:
            advantages = sum(reward_components.values())[:, None] * response_mask
            return advantages, advantages

        assert "=mine does not read" in refusal([estimator("mine"), *KL_IN_REWARD])

    def test_that_whitens_is_not_normalized_again(self) -> None:
        @register_advantage_estimator("mine")
        def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> Tensors:
            tokens = token_level_rewards[response_mask > 0]
            return (token_level_rewards - tokens.mean()) / tokens.std() * response_mask, token_level_rewards

        (warning,) = warnings([estimator("mine"), f"{ALGORITHM}.advantage_batch_normalize=true"])
        assert "=mine has done already" in warning

    def test_that_fails_is_one_of_several_problems(self) -> None:
        @register_advantage_estimator("mine")
        def mine(token_level_rewards: torch.Tensor) -> Tensors:
            return token_level_rewards.undefined, token_level_rewards

        @register_policy_loss("mine")
        def my_loss(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
            return log_probs

        text = refusal([estimator("mine"), loss("mine"), "trainer.policy_mini_batch_size=48"])
        assert text.startswith("3 problems in the configuration:")
        for sentence in (
            "=48 must divide",
            "=mine failed on a made-up example: AttributeError",
            "=mine returned a tensor",
        ):
            assert sentence in text


@pytest.mark.usefixtures("own")
class TestYourOwnLoss:
    @pytest.mark.parametrize(
        ("traits", "overrides", "sentence"),
        [
            ({"whole_batch": True}, [f"{CORRECTION}.tis_ratio_type=token"], "=mine, which chooses tokens"),
            (
                {"reads_rollout_logprobs": True},
                [f"{CORRECTION}.tis_ratio_type=token"],
                "=mine, which reads the engine's",
            ),
            ({"per_sequence": True}, [estimator("reinforce++")], "=mine takes one advantage for each trajectory"),
        ],
    )
    def test_obeys_the_rules_of_the_traits_that_it_declares(
        self, traits: dict[str, Any], overrides: list[str], sentence: str
    ) -> None:
        def mine(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, float]:
            return -log_probs, 0.0

        register_policy_loss("mine", **traits)(mine)
        assert sentence in refusal([loss("mine"), *overrides])
        load([loss("mine")])
        POLICY_LOSSES.unregister("mine")
        register_policy_loss("mine")(mine)
        load([loss("mine"), *overrides])

    def test_warns_of_what_it_declares_not_to_read_and_of_another_reduction(self) -> None:
        @register_policy_loss("mine", reads_eps_clip=False, loss_reduction="prompt_mean")
        def mine(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, float]:
            return -log_probs, 0.0

        assert warnings([loss("mine"), f"{ALGORITHM}.eps_clip_high=0.3"]) == [
            "trainer.algorithm.policy_loss_type=mine was published as prompt_mean, and "
            "trainer.algorithm.loss_reduction=token_mean weighs them otherwise; set "
            "trainer.algorithm.loss_reduction=prompt_mean",
            "trainer.algorithm.eps_clip_high=0.3 is not read by trainer.algorithm.policy_loss_type=mine, which clips "
            "nothing",
        ]


def test_the_reference_is_read_for_a_kl_divergence_or_by_the_estimator() -> None:
    assert reads_reference(load_config().trainer.algorithm)
    assert reads_reference(load_config(OmegaConf.from_dotlist(KL_IN_REWARD)).trainer.algorithm)
    for name in ESTIMATORS:
        cfg = load_config(OmegaConf.from_dotlist([NO_KL, TEACHER, estimator(name)]))
        assert reads_reference(cfg.trainer.algorithm) == (name == "on_policy_distillation")
