"""Write tasks for the environment browser: a button, a form, a list and a shop, each with many seeds.

    python -m examples.browser.browser_dataset --output_dir ~/data/browser --sites registration,books,shop

A seed decides the content of a site and its task. No task is in both files. Seeds are numbered from `--seed`, unless
`--source` is a file with the columns `site` and `seed`.
"""

from collections.abc import Sequence

import pyarrow as pa

from examples.prepare import Preparation, command_line, field, prepare, row_schema
from skyrl_gym.data.files import Row
from skyrl_gym.envs.browser.sites import SITES, make_site
from skyrl_train.errors import DataError

SCHEMA = row_schema({"site": pa.string(), "seed": pa.int64()})
N_TASKS = 1200


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """Return a task's dataset row."""
    site, seed = field(raw, "site", str), field(raw, "seed", int)
    try:
        task = make_site(site, seed).task
    except ValueError as error:
        raise DataError(str(error)) from error
    return {
        "data_source": f"browser_{site}",
        "prompt": [{"role": "user", "content": task}],
        "env_class": "browser",
        "reward_spec": {"method": "state"},
        "extra_info": {"split": split, "site": site, "seed": seed},
    }


def identity(row: Row) -> str:
    """Return the identity of a task. Two seeds may have the same question about different books."""
    return f"{row['extra_info']['site']} {row['extra_info']['seed']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "browser", default_source="sample")
    parser.add_argument("--sites", default="registration,books,shop", help=f"of {', '.join(SITES)}")
    parser.add_argument("--num_tasks", type=int, default=N_TASKS, help="tasks in both files together")
    args = parser.parse_args(argv)

    def sample(seed: int) -> list[Row]:
        sites = [name.strip() for name in args.sites.split(",")]
        return [{"site": sites[i % len(sites)], "seed": seed + i} for i in range(args.num_tasks)]

    prepare(Preparation(SCHEMA, dataset_row, sample, identity=identity), parser, args)


if __name__ == "__main__":
    main()
