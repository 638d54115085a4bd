"""PolicyQueue: vLLM's queue of waiting requests, ordered by a scheduling policy of the kit.

A policy is code of a user. If it raises an exception, or yields a request twice, one that does not wait, or none while
requests wait, the queue logs one sentence and serves first come, first served from there on. No request is lost. vLLM
is imported for its types only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from scheduler_components.engines.vllm_request import VllmRequest, VllmRequests
from scheduler_components.ports import SchedulingPolicy
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed
from scheduler_components.values import ScheduledChunk

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["PolicyQueue"]

_log = logging.getLogger("vllm.scheduler_components")


class PolicyQueue:
    """A virtual subclass of vLLM's ``RequestQueue``, with all of its methods.

    vLLM puts preempted and skipped requests back with the ``prepend`` methods. Their place is the policy's decision, so
    they are added like new ones, with the arrival that they had. The order is read lazily, once per step or until the
    queue changes.

    Args:
        policy: orders the requests.
        requests: the kit's views of vLLM's requests.
        step: returns the number of the present step.

    Attributes:
        num_replaced_policies: 1 after the policy failed.
    """

    __slots__ = ("_next", "_order", "_order_step", "_requests", "_step", "_waiting", "num_replaced_policies", "policy")

    def __init__(self, policy: SchedulingPolicy[VllmRequest], requests: VllmRequests, step: Callable[[], int]) -> None:
        self.policy = policy
        self.num_replaced_policies = 0
        self._requests = requests
        self._step = step
        self._waiting: dict[str, VllmRequest] = {}
        self._order: Iterator[VllmRequest] = iter(())
        self._order_step = -1
        self._next: VllmRequest | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request: a new one, or one that waits again."""
        view = self._requests.of(request)
        view.reread_tokens()
        self._waiting[view.rid] = view
        self._restart()
        try:
            self.policy.add(view, self._step())
        except Exception as error:  # noqa: BLE001 - logged; the policy is replaced
            self._replace_policy(f"add() raised {error!r}")

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Queue requests that wait again."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the next request.

        Raises:
            IndexError: the queue is empty.
        """
        return self._peek().theirs

    def pop_request(self) -> Request:
        """Remove and return the next request.

        Raises:
            IndexError: the queue is empty.
        """
        view = self._peek()
        self._next = None
        self._discard(view)
        view.prefill_end = view.num_input_tokens
        return view.theirs

    def remove_request(self, request: Request) -> None:
        """Remove a request. No effect if it does not wait here."""
        view = self._waiting.get(request.request_id)
        if view is not None and view.theirs is request:
            self._discard(view)
            self._restart()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, best first."""
        self._restart()
        return iter([view.theirs for view in self._checked_order(self._step())])

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[VllmRequest]]) -> None:
        """Report to the policy what this step computes."""
        try:
            self.policy.on_scheduled(chunks)
        except Exception as error:  # noqa: BLE001 - logged; the policy is replaced
            self._replace_policy(f"on_scheduled() raised {error!r}")

    def _restart(self) -> None:
        """Read the order again from its beginning at the next peek, because the queue has changed."""
        self._order_step = -1
        self._next = None

    def _peek(self) -> VllmRequest:
        if not self._waiting:
            raise IndexError("the queue is empty")
        step = self._step()
        if self._order_step != step:
            self._order_step, self._next = step, None
            self._order = self._checked_order(step)
        if self._next is None:
            self._next = next(self._order)
        return self._next

    def _discard(self, view: VllmRequest) -> None:
        del self._waiting[view.rid]
        try:
            self.policy.discard(view)
        except Exception as error:  # noqa: BLE001 - logged; the policy is replaced
            self._replace_policy(f"discard() raised {error!r}")

    def _checked_order(self, step: int) -> Iterator[VllmRequest]:
        """Yield every waiting request once: in the order of the policy, or of arrival from its first mistake on."""
        yielded: set[str] = set()
        problem = ""
        try:
            for view in self.policy.order(step):
                if view.rid in yielded or self._waiting.get(view.rid) is not view:
                    problem = f"order() yielded {view!r}, which was yielded before or does not wait"
                    break
                yielded.add(view.rid)
                yield view
        except Exception as error:  # noqa: BLE001 - logged; the policy is replaced
            problem = f"order() raised {error!r}"
        missing = [view for rid, view in self._waiting.items() if rid not in yielded]
        if missing:
            self._replace_policy(problem or f"order() left out {len(missing)} waiting requests")
        elif problem:
            self._replace_policy(problem)
        yield from sorted(missing, key=attrgetter("arrival"))

    def _replace_policy(self, problem: str) -> None:
        name = type(self.policy).__name__
        _log.error("scheduling policy %s: %s; requests are served first come, first served from now on", name, problem)
        self.num_replaced_policies += 1
        self.policy = FirstComeFirstServed()
        for view in sorted(self._waiting.values(), key=attrgetter("arrival")):
            self.policy.add(view, self._step())
        self._restart()
