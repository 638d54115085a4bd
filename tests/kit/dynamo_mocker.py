"""Dynamo's real mocker of vLLM as a process: ``python dynamo_mocker.py MODEL EVENTS_PORT REPLAY_PORT``.

It prints ``ready``. For each line with a number on its input it serves so many requests of 64 tokens, and prints one.
"""

from __future__ import annotations

import asyncio
import sys

from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input
from dynamo.runtime import DistributedRuntime

ENDPOINT = "kit.mocker.generate"


async def main() -> None:
    model, events_port, replay_port = sys.argv[1:]
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    engine = {
        "backend": "vllm", "block_size": 16, "num_gpu_blocks": 256, "emit_kv_events": True, "emit_kv_token_ids": True,
    }  # fmt: skip
    ports = {"zmq_kv_events_port": int(events_port), "zmq_replay_port": int(replay_port)}
    arguments = EntrypointArgs(
        engine_type=EngineType.Mocker,
        model_path=model,
        model_name="tiny",
        endpoint_id=f"dyn://{ENDPOINT}",
        kv_cache_block_size=16,
        mocker_engine_args={"engine": engine, "dynamo": ports},
    )
    serving = asyncio.ensure_future(run_input(runtime, f"dyn://{ENDPOINT}", await make_engine(runtime, arguments)))
    client = await runtime.endpoint(ENDPOINT).client()
    await client.wait_for_instances()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    num_requests = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        for _ in range(int(line)):
            num_requests += 1
            tokens = [(num_requests * 7_919 + index) % 1_000 for index in range(64)]
            request = {
                "model": "tiny", "token_ids": tokens, "stop_conditions": {"max_tokens": 4, "ignore_eos": True},
                "sampling_options": {}, "output_options": {}, "eos_token_ids": [], "annotations": [],
            }  # fmt: skip
            async for _ in await client.round_robin(request):
                continue
        sys.stdout.write("served\n")
        sys.stdout.flush()
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
