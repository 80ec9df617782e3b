"""`run_gsm8k.sh`: its data, its engine and its placement."""

from pathlib import Path

from train_kit.example_scripts import Recording, record

from examples.gsm8k import gsm8k_dataset
from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config import parse_cli
from skyrl_train.config.rules import WARNINGS, find_problems


def run(folder: Path, *overrides: str, **variables: str) -> Recording:
    variables = {"DATA_DIR": str(folder / "data"), **variables}
    return record(["bash", "examples/gsm8k/run_gsm8k.sh", *overrides], folder, **variables)


def test_it_prepares_data_and_trains_on_it(tmp_path: Path) -> None:
    (module, flags), (training, _) = run(tmp_path, SOURCE="sample").modules
    assert (module, flags) == (
        "examples.gsm8k.gsm8k_dataset",
        ["--output_dir", str(tmp_path / "data"), "--source", "sample"],
    )
    assert training == "skyrl_train.entrypoints.main_base"
    gsm8k_dataset.main([*flags, "--max_rows", "2"])
    ((_, overrides),) = run(tmp_path, "trainer.epochs=3", "trainer.algorithm.use_kl_loss=false").modules
    cfg = parse_cli(overrides)
    assert find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS) == []
    assert cfg.data.train_data == [f"{tmp_path}/data/train.parquet"]
    assert (cfg.trainer.epochs, cfg.trainer.algorithm.use_kl_loss) == (3, False)
    assert not cfg.trainer.placement.uses_ray
    named = f"data.train_data=['{tmp_path}/data/train.parquet']"
    assert len(run(tmp_path, named, DATA_DIR=str(tmp_path / "none")).modules) == 1


def test_each_of_several_gpus_has_a_rank_and_an_engine(tmp_path: Path) -> None:
    cfg = parse_cli(run(tmp_path, NUM_GPUS="4").training[1])
    assert list(find_problems(cfg, WARNINGS)) == []
    assert cfg.trainer.placement.size("policy") == (1, 4)
    assert cfg.generator.num_inference_engines == 4
