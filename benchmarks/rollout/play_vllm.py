"""The vLLM side of `engines.py`, in vLLM's environment: runs the workload once per line on standard input."""

import asyncio
import sys

from engines import NoTokenizer, engine_runner
from workloads import workloads

from skyrl_train.inference_engines.vllm.engine import VLLMEngine


def main() -> None:
    """Run `play_vllm.py <index of the workload> <folder of its model>`."""
    workload, folder = workloads()[int(sys.argv[1])], sys.argv[2]
    options = {
        "model": folder,
        "dtype": "float32",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 31,
        "block_size": 32,
    }
    engine = VLLMEngine(options, NoTokenizer())  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    run = engine_runner(engine, workload.conversations, loop)
    for _ in sys.stdin:
        print("seconds", run(), flush=True)
    loop.run_until_complete(engine.close())
    loop.close()


if __name__ == "__main__":
    main()
