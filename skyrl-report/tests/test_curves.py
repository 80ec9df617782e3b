import json

from skyrl_report.curves import CurveRun, encode_curves, group_key, thin
from skyrl_report.series import Series


def test_thinning_keeps_peaks_and_gaps() -> None:
    values: list[float | None] = [float(i % 7) for i in range(10_000)]
    values[5017], values[7033] = 99.0, -99.0
    values[2000:2400] = [None] * 400
    thinned = thin(Series("a", tuple(range(10_000)), tuple(values)), 400)
    assert len(thinned.steps) <= 400
    assert (max(thinned.finite), min(thinned.finite)) == (99.0, -99.0)
    assert thinned.n_not_finite > 0
    assert (thinned.steps[0], thinned.steps[-1]) == (0, 9999)
    assert thin(thinned, 400) == thinned


def test_axes_and_shared_steps() -> None:
    rows = [
        {"step": 0, "eval/all/avg_score": 0.1},
        {"step": 1, "timing/step": 2.0, "trainer/tokens_per_second": 100.0, "a": 1.0, "b": None},
        {"step": 2, "timing/step": 2.0, "timing/eval": 4.0, "trainer/tokens_per_second": 50.0, "a": 3.0, "b": 2.0},
    ]
    text = encode_curves([CurveRun("</script>", "g", "c0", rows)])
    assert "<" not in text
    (run,) = json.loads(text)["runs"]
    assert run["name"] == "</script>"
    assert (run["steps"], run["time"], run["tokens"]) == ([0, 1, 2], [0.0, 2.0, 8.0], [0, 200, 300])
    assert run["series"]["a"][0] == run["series"]["b"][0], "the same steps"
    assert run["series"]["b"][1] == [None, 2.0]


def test_groups_of_seeds() -> None:
    def config(seed: int, lr: float = 1e-3, model: str = "tiny") -> dict[str, object]:
        paths = {"output_dir": f"/o{seed}", "ckpt_path": f"/o{seed}/c", "run_name": f"shaped-seed{seed}"}
        return {"trainer": {"seed": seed, "lr": lr, "model": {"path": f"/m/{seed}/{model}-seed{seed}"}, **paths}}

    assert group_key(config(1)) == group_key(config(2))
    assert group_key(config(1)) != group_key(config(1, lr=1e-4))
    assert group_key(config(1)) != group_key(config(1, model="large"))
