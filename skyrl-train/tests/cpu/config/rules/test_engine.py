from __future__ import annotations

from train_kit.rules import ASYNC, SERVER, Cases, RuleContract, load

from skyrl_train.config.rules import engine

LOCAL, URLS = "generator.run_engines_locally", "generator.remote_inference_engine_urls"
N_ENGINES, BACKEND = "generator.num_inference_engines", "generator.backend"
TENSOR_SIZE = "generator.inference_engine_tensor_parallel_size"
TWO_GPUS = f"{TENSOR_SIZE}=2 {BACKEND}=vllm"
SYNC, DELTA = "generator.weight_sync_backend", "generator.weight_sync_delta"
PLACEMENT = "trainer.placement"
SAMPLING = "generator.sampling_params"

REFUSED: Cases = {
    # input_length_covers_prompts
    "generator.max_input_length=600": [],
    "generator.max_input_length=256 generator.max_turns=5": ["generator.max_input_length=4096"],
    # weights_have_a_transport
    f"{SERVER} {SYNC}=cuda_ipc": [f"{SYNC}=nccl"],
    f"{SYNC}=cuda_ipc {PLACEMENT}.colocate_all=false": [f"{PLACEMENT}.colocate_all=true {PLACEMENT}.launcher=ray"],
    f"{SYNC}=nccl {DELTA}=true {PLACEMENT}.launcher=ray": [],
    f"{DELTA}=true": [ASYNC, SERVER],
    # engines_have_devices
    f"{N_ENGINES}=2": [],
    f"{N_ENGINES}=3 {PLACEMENT}.policy_num_gpus_per_node=2": [],
    f"{TWO_GPUS} {N_ENGINES}=3 {PLACEMENT}.policy_num_nodes=2 {PLACEMENT}.policy_num_gpus_per_node=3": [],
    f"{TWO_GPUS} generator.inference_engine_data_parallel_size=2 {PLACEMENT}.policy_num_gpus_per_node=2": [
        "generator.inference_engine_data_parallel_size=1"
    ],
    # engine_fits_its_devices
    f"{TENSOR_SIZE}=2": [],
    TWO_GPUS: [f"{BACKEND}=sglang"],
    # servers_have_addresses
    f"{URLS}=[gpu:8000]": [SERVER],
    f"{LOCAL}=false {BACKEND}=vllm": [],
    f"{SERVER} {URLS}=[gpu:8000,gpu:8001]": [],
    f"{SERVER} {URLS}=[gpu:8000,gpu:8000] {N_ENGINES}=2": [f"{N_ENGINES}=1 {URLS}=[gpu:8000]"],
    f"{LOCAL}=false {URLS}=[gpu:8000]": [],
    f"{SERVER} generator.max_num_seqs=8": [],
    # engine_has_its_options
    f"{SAMPLING}.top_p=0.9 {BACKEND}=sglang": [f"{SAMPLING}.top_p=1.0"],
    "generator.engine_init_kwargs.block_size=32": [],
    "generator.enforce_eager=false": [],
    "generator.enable_prefix_caching=false": [],
    # conversation_has_one_mode
    "generator.step_wise_trajectories=true generator.use_conversation_multi_turn=false": [],
    "generator.merge_stepwise_output=true": ["generator.step_wise_trajectories=true"],
    # sampling_lengths_are_ordered
    f"{SAMPLING}.min_tokens=8 {SAMPLING}.max_generate_length=4": [f"{SAMPLING}.min_tokens=4"],
}
WARNED: Cases = {
    # engines_use_all_devices
    f"{PLACEMENT}.policy_num_nodes=2 {PLACEMENT}.policy_num_gpus_per_node=4 {TWO_GPUS}": [
        f"{PLACEMENT}.policy_num_nodes=1 {PLACEMENT}.policy_num_gpus_per_node=2",
        f"{PLACEMENT}.policy_num_nodes=1 {PLACEMENT}.policy_num_gpus_per_node=3",
        f"{PLACEMENT}.colocate_all=false",
        f"{SERVER} {TENSOR_SIZE}=1",
    ],
    # sampling_is_unusual
    "generator.eval_n_samples_per_prompt=8": [],
    "generator.eval_sampling_params.temperature=50": ["generator.eval_sampling_params.temperature=1.5"],
    "environment.skyrl_gym.call_timeout_seconds=0.01": ["environment.skyrl_gym.call_timeout_seconds=5"],
}


class TestEngine(RuleContract):
    module, refused, warned = engine, REFUSED, WARNED
    tested_elsewhere = ("engine_is_installed",)


def test_a_chat_template_is_no_option_of_an_engine() -> None:
    load("generator.engine_init_kwargs.chat_template=x.jinja")
    load(f"{SERVER} generator.engine_init_kwargs.chat_template=x.jinja")


def test_rollouts_may_be_batched_in_any_form() -> None:
    load("generator.batched=true generator.max_turns=5")
    load(f"generator.async_engine=false generator.batched=false {BACKEND}=vllm")
