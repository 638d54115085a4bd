"""Workloads whose ``state_digest`` is written down: every decision of a scheduler over hundreds of steps."""

from __future__ import annotations

from random import Random

from scheduler_components import ParallelState
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

_STEPS = 40


def digest_of(seed: int) -> tuple[int, int]:
    """Serve a random workload on a scheduler of random sizes; return its digest and the number of retractions."""
    random = Random(seed)
    page_size = random.choice((1, 2, 4, 16))
    config = SchedulerConfig(
        page_size=page_size,
        kv_tokens=page_size * random.randint(12, 60),
        max_running_requests=random.choice((2, 4, 64)),
        max_prefill_tokens=random.choice((8, 24, 4096)),
        chunk_tokens=random.choice((5, 16, 2048)),
        new_token_ratio=random.choice((0.0, 0.2, 0.7)),
        min_new_token_ratio=0.0,
    )
    model = SimulatedModel(vocab_size=3, eos_token_id=2, mean_output_tokens=30)
    device = SimulatedDevice(model=model, clock=lambda: 0.0, sleep=lambda _: None)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device)
    num_submitted = num_retracted = 0
    for step in range(_STEPS):
        for _ in range(random.choice((0, 0, 1, 2))):
            length = random.randint(1, max(1, config.kv_tokens // 2))
            prompt = [0] * random.randint(0, length - 1)
            prompt += [random.randrange(3) for _ in range(length - len(prompt))]
            limits = SamplingLimits(max_new_tokens=random.randint(1, max(1, config.kv_tokens - length)))
            scheduler.submit(EngineRequest(f"r{num_submitted}", prompt, limits))
            num_submitted += 1
        if random.random() < 0.1:
            scheduler.abort(f"r{random.randrange(num_submitted + 1)}")
        if step == _STEPS // 2:
            scheduler.retract_all()
        num_retracted += scheduler.step().num_retracted
    num_retracted += sum(result.num_retracted for result in scheduler.drain())
    return scheduler.state_digest, num_retracted
