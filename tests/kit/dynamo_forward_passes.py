"""Dynamo's real relay and subscriber as a process: ``python dynamo_forward_passes.py ADDRESS [track]``.

The relay connects to ADDRESS. The process prints ``ready``, then each payload that the subscriber gets, in hexadecimal.
For each line ``direct`` on its input, Dynamo's own publisher sends one message, too.

With ``track`` the process registers a model, as a worker does, and prints the worker's identifier. The subscriber keeps
the newest message of each replica of known workers, as Dynamo's planner uses it. For each line on its input the process
prints them as a JSON list of worker, rank and payload.
"""

from __future__ import annotations

import asyncio
import json
import sys

from dynamo.llm import (
    FpmDirectPublisher,
    FpmEventRelay,
    FpmEventSubscriber,
    ModelInput,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

COUNTS = {
    "scheduled_num_prefill_requests": 2,
    "scheduled_sum_prefill_tokens": 72,
    "scheduled_sum_prefill_kv_tokens": 32,
    "scheduled_num_decode_requests": 2,
    "scheduled_sum_decode_kv_tokens": 30,
    "queued_num_prefill_requests": 2,
    "queued_sum_prefill_tokens": 80,
    "queued_num_decode_requests": 1,
    "queued_sum_decode_kv_tokens": 70_000,
}


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main() -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("kit.planner.generate")
    subscriber = FpmEventSubscriber(endpoint)
    relay = FpmEventRelay(endpoint, sys.argv[1])
    try:
        await (track if sys.argv[2:] == ["track"] else forward)(endpoint, subscriber)
    finally:
        relay.shutdown()


async def forward(endpoint: object, subscriber: FpmEventSubscriber) -> None:
    show("ready")

    async def receive() -> None:
        while (payload := await asyncio.to_thread(subscriber.recv)) is not None:
            show(payload.hex())

    receiving = asyncio.ensure_future(receive())
    direct = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "direct\n":
            direct = direct or FpmDirectPublisher(endpoint, "direct", dp_size=1)
            direct.publish(dp_rank=0, wall_time_secs=0.25, **COUNTS)
    receiving.cancel()


async def track(endpoint: object, subscriber: FpmEventSubscriber) -> None:
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, "kit", worker_type=WorkerType.Aggregated, skip_model_assets=True
    )
    subscriber.start_tracking()
    show(str(endpoint.connection_id()))  # type: ignore[attr-defined]
    while await asyncio.to_thread(sys.stdin.readline):
        recent = subscriber.get_recent_stats()
        show(json.dumps([(worker, rank, payload.hex()) for (worker, rank), payload in recent.items()]))


if __name__ == "__main__":
    asyncio.run(main())
