import asyncio

import tinker
from passes import ADAM, Server, outputs_of
from tinker import types


async def train(server: Server, service: tinker.ServiceClient) -> None:
    training = await service.create_lora_training_client_async(server.base_model, rank=4)
    passed = await training.forward_backward_async(server.data, "cross_entropy")
    stepped = await training.optim_step_async(ADAM)
    first = await passed.result_async()
    await stepped.result_async()
    saved = await (await training.save_state_async("one")).result_async()
    sampler = await training.save_weights_and_get_sampling_client_async()
    futures = [
        sampler.sample_async(types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=3))
        for _ in range(4)
    ]
    for result in await asyncio.gather(*futures):
        assert [len(one.tokens) <= 3 for one in result.sequences] == [True, True]
    assert len(await sampler.compute_logprobs_async(types.ModelInput.from_ints([5, 6]))) == 2
    resumed = await service.create_training_client_from_state_with_optimizer_async(saved.path)
    later = await (await resumed.forward_async(server.data, "cross_entropy")).result_async()
    assert later.metrics["loss:sum"] < first.metrics["loss:sum"]
    assert len(outputs_of(later)) == len(server.data)


def test_asyncio(server: Server, service: tinker.ServiceClient) -> None:
    """Training, saving, sampling and resuming work in asyncio."""
    asyncio.run(train(server, service))
