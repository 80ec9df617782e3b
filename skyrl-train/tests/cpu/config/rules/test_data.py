from __future__ import annotations

from train_kit.rules import Cases, RuleContract

from skyrl_train.config.rules import data

CLASS = "data.custom_cls.path=x.py data.custom_cls.name=X"

REFUSED: Cases = {
    # training_has_prompts
    "data.train_data=[]": ["data.train_data=[a.jsonl]", f"data.val_data=[] {CLASS}"],
    # custom_dataset_is_complete
    "data.custom_cls.path=x.py": ["data.custom_cls.name=X"],
    "data.custom_cls.name=X": ["data.custom_cls.path=x.py"],
    "data.custom_cls.config.n=3": [CLASS],
    f"{CLASS} data.mixture.min_per_batch=1": ["data.mixture.min_per_batch=0"],
    # custom_reward_function_is_called
    "custom_reward_function.path=x.py environment.env_class=aime": ["environment.env_class=reward_function"],
    "custom_reward_function.path=x.py generator.max_turns=2": [],
    # interpreter_has_processes
    "environment.skyrl_gym.python=python3.12": [],
    # validation_data_is_read_once
    "data.val_data=[a.jsonl,b.jsonl,./a.jsonl]": ["data.val_data=[a.jsonl,b.jsonl]"],
}
WARNED: Cases = {
    # evaluation_has_prompts
    "data.val_data=[]": ["data.val_data=[a.jsonl]"],
    # training_data_is_read_once
    "data.train_data=[a.jsonl,./a.jsonl]": ["data.train_data=[a.jsonl,b.jsonl]"],
}


class TestData(RuleContract):
    module, refused, warned = data, REFUSED, WARNED
