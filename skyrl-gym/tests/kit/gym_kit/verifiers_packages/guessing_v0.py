"""A game of several turns with its own end."""

import verifiers as vf
from datasets import Dataset

log: list[str] = []
"""Events of all environments in this process."""


class GuessingEnv(vf.MultiTurnEnv):
    def __init__(self, fault: str = "", **kwargs):
        super().__init__(**kwargs)
        self.fault = fault

    async def setup_state(self, state: vf.State) -> vf.State:
        if self.fault == "setup":
            raise vf.SandboxError("no sandbox")
        state["guesses"] = []
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        if self.fault == "step":
            raise vf.SandboxError("the sandbox died")
        if self.fault == "bug":
            raise KeyError("board")
        if self.fault == "other":
            raise vf.Error("odd")
        state["guesses"].append(messages[-1]["content"])
        if state["guesses"][-1] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return []
        return [{"role": "user", "content": f"Wrong, and that was guess {len(state['guesses'])}."}]

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        messages = await super().get_prompt_messages(state)
        if self.fault == "forget all":
            return [messages[-1]]
        return [messages[0], messages[-1]] if self.fault == "forget" else messages

    @vf.stop
    async def gave_up(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "I give up"

    @vf.cleanup
    async def put_away(self, state: vf.State) -> None:
        log.append(f"put away {state['answer']}")


def found(state: vf.State, answer: str) -> float:
    return float(state["trajectory"][-1]["completion"][-1]["content"] == answer)


def load_environment(fault: str = "", max_turns: int = 5) -> vf.Environment:
    dataset = Dataset.from_list([{"question": "Guess my number.", "answer": str(i)} for i in range(1, 4)])
    return GuessingEnv(dataset=dataset, rubric=vf.Rubric([found]), fault=fault, max_turns=max_turns)
