from skyrl_gym.envs.search.grading import compute_score, extract_solution


def test_last_answer_is_scored() -> None:
    assert extract_solution("<answer>a</answer> <answer> b </answer>") == "b"
    assert extract_solution("nothing") is None
    assert compute_score("<answer>x</answer>", {"target": "x"}, score=2.0) == 2.0
    assert compute_score("<answer>y</answer>", {"target": "x"}, format_score=0.1) == 0.1
    assert compute_score("y", {"target": "x"}, format_score=0.1) == 0.0
