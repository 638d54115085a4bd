"""The rules of Dynamo's KV router (``ai-dynamo-runtime`` 1.6.1) as a router of this kit's simulation.

``benchmarks.studies.dynamo_replay`` runs Dynamo's own router in Dynamo's replay, these rules in the simulation, and
the kit's ``KvRouter`` in the simulation. If the first two agree, the simulations agree, and what is left between the
first and the third are the rules. Each rule below can be switched off, or be replaced by ``KvRouter``'s.

The rules, as ``lib/kv-router`` of the public repository has them (``scheduling/selector``, ``sequences``):

1. Cost of a replica, in blocks: ``max(0, (queued + prompt) / block - credit * overlap) + decode``. The lowest wins.
2. ``queued``: uncached prompt tokens of the requests that were sent there and have no first token yet. The whole prompt
   counts until then. No load report is read.
3. ``decode``: distinct prompt blocks of the requests that were sent there and have not ended, the new one included.
   Blocks of the output do not count.
4. ``overlap``: leading blocks of the prompt that the replica's events have stored and not removed. What was sent and is
   not computed yet does not count.
5. Equal costs are decided by a random number without a seed, so two runs of one trace differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_components.cache import hash_pages
from scheduler_components.events import BlockRemoved, BlockStored
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.values import LoadSnapshot
from scheduler_engine.simulation import SimulatedRequest

_ROUNDING = 1e-6  # blocks; costs are sums of fractions of a block


@dataclass(slots=True, kw_only=True)
class _Sent:
    """A request that was sent to a replica and has not ended."""

    request: SimulatedRequest
    hashes: Sequence[int]
    num_uncached_tokens: int


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What the router knows of a replica.

    Attributes:
        held: blocks that its events have stored and not removed.
        sent: requests in flight, by id.
        active: their prompt blocks, with the number of requests that have each.
    """

    held: set[object] = field(default_factory=set)
    sent: dict[str, _Sent] = field(default_factory=dict)
    active: Counter[int] = field(default_factory=Counter)

    def queued_tokens(self, now_ns: int) -> int:
        return sum(
            each.num_uncached_tokens for each in self.sent.values() if not 0 <= each.request.first_token_ns <= now_ns
        )


def _depth(hashes: Sequence[int], *blocks: Container[object]) -> int:
    """Return how many leading blocks are each in one of ``blocks``."""
    for depth, block_hash in enumerate(hashes):
        if not any(block_hash in each for each in blocks):
            return depth
    return len(hashes)


@dataclass(slots=True, kw_only=True)
class DynamoRules:
    """Routes by the rules of this module.

    Attributes:
        page_size: tokens per block.
        overlap_credit: blocks of the cost that a cached block saves (Dynamo's ``overlap_score_credit``).
        counts_queued, counts_decode: False leaves out the term (``router_track_prefill_tokens``,
            ``router_track_active_blocks``).
        speculates: the blocks of requests in flight count as cached, as in ``KvRouter``.
        choices: replica per request, in order: what another router chose. It is followed and compared with these rules.
        num_ties: decisions with equal costs so far. Without ``choices`` the lowest index wins.
        num_foreign_choices: followed choices that do not cost least here.
    """

    page_size: int
    overlap_credit: float = 1.0
    counts_queued: bool = True
    counts_decode: bool = True
    speculates: bool = False
    choices: Sequence[int] | None = None
    num_ties: int = 0
    num_foreign_choices: int = 0
    _workers: dict[int, _Worker] = field(default_factory=dict, init=False, repr=False)
    _decoder: BatchDecoder = field(default_factory=BatchDecoder, init=False, repr=False)

    wants_events: ClassVar[bool] = True
    wants_load: ClassVar[bool] = False

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        if not self._workers:
            return None
        hashes = hash_pages(request.token_ids, self.page_size)
        costs = {replica: self._cost(worker, request, hashes, now_s) for replica, worker in self._workers.items()}
        replica = self._pick(costs, request.recorded.index)
        worker = self._workers[replica]
        num_cached_tokens = self._overlap(worker, hashes) * self.page_size
        num_uncached_tokens = max(0, request.num_input_tokens - num_cached_tokens)
        worker.sent[request.rid] = _Sent(request=request, hashes=hashes, num_uncached_tokens=num_uncached_tokens)
        worker.active.update(hashes)
        return replica

    def _cost(self, worker: _Worker, request: SimulatedRequest, hashes: Sequence[int], now_s: float) -> float:
        num_tokens = request.num_input_tokens + worker.queued_tokens(round(now_s * 1e9)) if self.counts_queued else 0
        num_saved_blocks = self.overlap_credit * self._overlap(worker, hashes)
        decode = len(worker.active) + len(hashes) - _depth(hashes, worker.active) if self.counts_decode else 0
        return max(0.0, num_tokens / self.page_size - num_saved_blocks) + decode

    def _overlap(self, worker: _Worker, hashes: Sequence[int]) -> int:
        return _depth(hashes, worker.held, worker.active) if self.speculates else _depth(hashes, worker.held)

    def _pick(self, costs: dict[int, float], index: int) -> int:
        least = min(costs.values())
        tied = [replica for replica, cost in costs.items() if cost - least < _ROUNDING]
        self.num_ties += len(tied) > 1
        if self.choices is None:
            return tied[0]
        self.num_foreign_choices += self.choices[index] not in tied
        return self.choices[index]

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        held = self._workers[replica].held
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.block_hashes)
            else:
                held.clear()

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        pass

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        worker = self._workers[replica]
        for block_hash in worker.sent.pop(request.rid).hashes:
            worker.active[block_hash] -= 1
            if not worker.active[block_hash]:
                del worker.active[block_hash]

    def on_replica_up(self, replica: int, now_s: float) -> None:
        self._workers[replica] = _Worker()

    def on_replica_down(self, replica: int, now_s: float) -> None:
        self._workers.pop(replica, None)
