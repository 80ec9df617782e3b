"""Environments and their registry.

Importing this package registers the built-in environments. Each module is imported when its environment is first made.
"""

from skyrl_gym.envs.registration import EnvSpec, deregister, make, pprint_registry, register, registry, spec

__all__ = ["BUILT_IN", "EnvSpec", "deregister", "make", "pprint_registry", "register", "registry", "spec"]

BUILT_IN = {
    "aime": "skyrl_gym.envs.aime.env:AIMEEnv",
    "answer": "skyrl_gym.envs.answer.env:AnswerEnv",
    "browser": "skyrl_gym.envs.browser.env:BrowserEnv",
    "gsm8k": "skyrl_gym.envs.gsm8k.env:GSM8kEnv",
    "gsm8k_multi_turn": "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv",
    "gymnasium": "skyrl_gym.adapters.gymnasium:GymnasiumEnv",
    "ifeval": "skyrl_gym.envs.ifeval.env:IFEvalEnv",
    "judge": "skyrl_gym.judges.env:JudgeEnv",
    "lcb": "skyrl_gym.envs.lcb.env:LCBEnv",
    "mcp": "skyrl_gym.adapters.mcp:MCPEnv",
    "multiply": "skyrl_gym.envs.multiply.env:MultiplyEnv",
    "openenv": "skyrl_gym.adapters.openenv:OpenEnvEnv",
    "openspiel": "skyrl_gym.envs.openspiel.env:OpenSpielEnv",
    "openspiel_game": "skyrl_gym.envs.openspiel.game_env:OpenSpielGameEnv",
    "reply": "skyrl_gym.envs.reply.env:ReplyEnv",
    "reward_function": "skyrl_gym.adapters.reward_function:RewardFunctionEnv",
    "search": "skyrl_gym.envs.search.env:SearchEnv",
    "searchcode": "skyrl_gym.envs.searchcode.env:SearchCodeEnv",
    "text2sql": "skyrl_gym.envs.sql.env:SQLEnv",
    "textarena": "skyrl_gym.adapters.textarena:TextArenaEnv",
    "trl": "skyrl_gym.adapters.trl:TrlEnv",
    "verifiers": "skyrl_gym.adapters.verifiers:VerifiersEnv",
}

for _id, _entry_point in BUILT_IN.items():
    register(_id, _entry_point)
