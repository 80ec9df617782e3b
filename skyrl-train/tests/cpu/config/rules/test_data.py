from train_kit.rules import RuleContract

from skyrl_train.config.rules import data


class TestData(RuleContract):
    module = data
