"""The hooks on SGLang's scheduling, without SGLang: settings, order of the waiting list, verdicts of the adder."""

from __future__ import annotations

import enum
import logging
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.engines.sglang_scheduling import (
    SCHEDULING_VARIABLE,
    SglangScheduling,
    SglangSchedulingSettings,
    make_prefill_adder,
)
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed


class Verdict(enum.Enum):
    CONTINUE = "continue"
    NO_TOKEN = "no token"
    OTHER = "other"


class PrefillBudget:
    def __init__(self, available: int, total_offset: float) -> None:
        self.available, self.total_offset = available, total_offset

    def _available_and_evictable(self) -> int:
        return self.available


class OtherBudget(PrefillBudget):
    """A budget over pools of several kinds."""


@dataclass(eq=False)
class Request:
    """The members of SGLang's ``Req`` that are read."""

    rid: str
    origin_input_ids: list[int]
    cached: int = 0
    priority: int | None = None
    lora_id: str | None = None
    num_matched_prefix_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_new_tokens=8))


@dataclass
class Policy:
    """The members of SGLang's ``SchedulePolicy`` that are read, and what its sort was called with."""

    policy: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(value="fcfs"))
    tree_cache: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(disable=False))
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    sorted_sizes: list[int] = field(default_factory=list)


def initialize(policy: Policy) -> None:
    """Replaces the constructor of SGLang's policy."""


def sort_as_sglang(policy: Policy, waiting: list[Request], running: object = None, processed_tokens: int = 0) -> None:
    policy.sorted_sizes.append(len(waiting))


def match_kv_cache(request: Request, cache: object, tokens: list[int]) -> None:
    request.num_matched_prefix_tokens = min(request.cached, len(tokens))


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = SimpleNamespace(AddReqResult=Verdict, match_kv_cache=match_kv_cache)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_policy", policies)
    monkeypatch.setitem(
        sys.modules, "sglang.srt.mem_cache.prefill_budget", SimpleNamespace(PrefillBudget=PrefillBudget)
    )


def scheduling(policy: Policy, name: str) -> SglangScheduling:
    hooks = SglangScheduling(settings=SglangSchedulingSettings(policy=name))
    hooks.make_policy(initialize, policy)
    return hooks


def requests(*cached: int) -> list[Request]:
    return [Request(str(at), [at] * 100, number) for at, number in enumerate(cached)]


def order(hooks: SglangScheduling, policy: Policy, waiting: list[Request]) -> list[str]:
    hooks.calc_priority(sort_as_sglang, policy, waiting)
    return [request.rid for request in waiting]


def test_the_list_is_sorted_in_place_by_the_policy() -> None:
    policy, waiting = Policy(), requests(40, 0, 90, 40)
    same_list = waiting
    assert order(scheduling(policy, "lpm"), policy, waiting) == ["2", "0", "3", "1"]
    assert waiting is same_list


def test_sglangs_own_sort_runs_first_unless_it_matches_prefixes() -> None:
    """Its other policies leave matches for load reports and refresh the cache."""
    policy, waiting = Policy(), requests(0, 0)
    order(scheduling(policy, "fcfs"), policy, waiting)
    assert policy.sorted_sizes == [2]
    policy.policy.value = "lpm"
    order(scheduling(policy, "lpm"), policy, waiting)
    assert policy.sorted_sizes == [2]


def test_a_retracted_request_is_behind_all_others_as_in_sglang() -> None:
    policy, waiting = Policy(), requests(0, 0, 0)
    hooks = scheduling(policy, "fcfs")
    order(hooks, policy, waiting)
    retracted = waiting.pop(0)  # admitted, and retracted before the next sort
    hooks.on_request_queued(None, retracted)
    waiting.append(retracted)
    assert order(hooks, policy, waiting) == ["1", "2", "0"]


@pytest.mark.parametrize(("low_first", "expected"), [(False, ["1", "2", "0"]), (True, ["0", "2", "1"])])
def test_priorities_have_sglangs_direction(low_first: bool, expected: list[str]) -> None:
    policy = Policy(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    waiting = requests(0, 0, 0)
    for request, priority in zip(waiting, (1, 9, 5), strict=True):
        request.priority = priority
    assert order(scheduling(policy, "priority"), policy, waiting) == expected
    policy.enable_priority_scheduling = False
    waiting.sort(key=lambda request: request.rid)
    assert order(scheduling(policy, "priority"), policy, waiting) == ["0", "1", "2"]


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=20))
def test_first_come_first_served_never_moves_a_request(steps: list[tuple[int, int, int]]) -> None:
    """Whatever arrives, is admitted from the front and is retracted, the list keeps SGLang's own order."""
    policy, waiting, running = Policy(), [], []
    hooks = scheduling(policy, "fcfs")
    for number, (arrivals, admitted, retracted) in enumerate(steps):
        for at in range(arrivals):
            waiting.append(Request(f"{number}.{at}", [1]))
            hooks.on_request_queued(None, waiting[-1])
        expected = list(waiting)
        hooks.calc_priority(sort_as_sglang, policy, waiting)
        assert waiting == expected
        running += waiting[:admitted]
        del waiting[:admitted]
        if running and not retracted:
            hooks.on_request_queued(None, running[-1])
            waiting.append(running.pop())


def test_a_policy_that_fails_is_removed_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    policy, waiting = Policy(), requests(0, 0)
    hooks = scheduling(policy, "priority")
    policy.enable_priority_scheduling = True
    waiting[1].priority = "high"  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        assert order(hooks, policy, waiting) == ["0", "1"]
        assert order(hooks, policy, waiting) == ["0", "1"]
    (record,) = caplog.records
    assert "SGLang orders the waiting requests again: policy 'priority' failed: priority='high'" in record.getMessage()
    assert policy.sorted_sizes == [2, 2, 2]


class ForgetsNothing(FirstComeFirstServed):
    """A policy of a user that fails at the first retraction."""

    def __init__(self, match_length: object) -> None:
        super().__init__()

    def discard(self, request: object) -> None:
        raise KeyError(request)


def fail(match_length: object) -> None:
    raise OSError("no table of tenants")


def test_a_policy_of_the_user_never_ends_sglangs_step(caplog: pytest.LogCaptureFixture) -> None:
    policy, waiting = Policy(), requests(0, 0)
    hooks = scheduling(policy, f"{__name__}:ForgetsNothing")
    order(hooks, policy, waiting)
    with caplog.at_level(logging.ERROR):
        hooks.on_request_queued(None, waiting[0])
        assert order(hooks, policy, waiting) == ["0", "1"]
        assert order(scheduling(policy, f"{__name__}:fail"), policy, waiting) == ["0", "1"]
    assert [record.getMessage().count("failed: ") for record in caplog.records] == [1, 1]


def test_a_policy_of_cached_prefixes_needs_sglangs_cache(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(tree_cache=SimpleNamespace(disable=True))
    waiting = requests(0, 50)
    with caplog.at_level(logging.WARNING):
        assert order(scheduling(policy, "lpm"), policy, waiting) == ["0", "1"]
    assert "policy 'lpm' needs SGLang's prefix cache, which is off" in caplog.text
    assert policy.sorted_sizes == [2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"policy": "sjf"}', "policy='sjf': is not a policy that SGLang's requests can be ordered by"),
        ('{"policy": "virtual-token-counter"}', "policy='virtual-token-counter': is not a policy"),
        ('{"order": "lpm"}', f"order='lpm': is not a setting of {SCHEDULING_VARIABLE}"),
        ('{"admission": 1}', "admission=1: is not true or false"),
        ('{"admission": true, "watermark_pages": -1}', "watermark_pages=-1: is too small; give at least 0"),
        ('{"policy": 5}', "policy=5: is not a string"),
        ('{"policy": false}', "policy=False: is not a string"),
        ("lpm", f"{SCHEDULING_VARIABLE}='lpm': "),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_changes_nothing(
    text: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as error:
        SglangSchedulingSettings.from_cli(text)
    assert sentence in str(error.value)
    with caplog.at_level(logging.ERROR):
        found = SglangScheduling.from_environment({SCHEDULING_VARIABLE: text})
    assert "SGLang orders and admits requests itself, without scheduler-components" in caplog.text
    assert found.settings == SglangSchedulingSettings()


class PrefillAdder:
    """SGLang's answers (0.5.23, ``budget_state`` and ``PrefillBudget.check_prefill``)."""

    page_size = 16

    def __init__(self, memory: PrefillBudget, tokens: int, chunk: int | None, running: int = 0) -> None:
        self.memory_budget, self.rem_input_tokens, self.rem_chunk_tokens = memory, tokens, chunk
        self.dllm_config = self.rem_mamba_slots = None
        self.running_batch, self.can_run_list = SimpleNamespace(reqs=[None] * running), []

    @property
    def remaining(self) -> float:
        return self.memory_budget.available - self.memory_budget.total_offset

    def budget_state(self) -> Verdict:
        if self.remaining <= 0:
            return Verdict.NO_TOKEN
        is_spent = self.rem_input_tokens <= 0 or (self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0)
        return Verdict.OTHER if is_spent else Verdict.CONTINUE

    def _check_prefill_budget(
        self, req: object, *, total_tokens: int, chunk_limit: int | None
    ) -> tuple[bool, int | None]:
        return (True, chunk_limit) if total_tokens < self.remaining else (False, None)


@given(
    available=st.integers(0, 40),
    offset=st.integers(0, 80).map(lambda halves: halves / 2),
    tokens=st.integers(-3, 3),
    chunk=st.none() | st.integers(-3, 3),
    demand=st.integers(0, 40),
    running=st.integers(0, 2),
)
def test_without_a_watermark_the_verdicts_are_sglangs(
    available: int, offset: float, tokens: int, chunk: int | None, demand: int, running: int
) -> None:
    theirs = PrefillAdder(PrefillBudget(available, offset), tokens, chunk, running)
    ours = make_prefill_adder(PrefillAdder, 0)(theirs.memory_budget, tokens, chunk, running)
    for _ in range(2):  # the budget is asked repeatedly in one step
        assert ours.budget_state() is theirs.budget_state()
        question = {"total_tokens": demand, "chunk_limit": chunk}
        assert ours._check_prefill_budget(None, **question) == theirs._check_prefill_budget(None, **question)


def test_a_watermark_keeps_pages_free_only_while_requests_run() -> None:
    adder_class = make_prefill_adder(PrefillAdder, 2)
    question = {"total_tokens": 60, "chunk_limit": 64}
    assert adder_class(PrefillBudget(100, 0), 64, 64, 0)._check_prefill_budget(None, **question) == (True, 64)
    busy = adder_class(PrefillBudget(100, 0), 64, 64, 1)
    assert busy._check_prefill_budget(None, total_tokens=67, chunk_limit=64) == (True, 64)
    assert busy._check_prefill_budget(None, total_tokens=68, chunk_limit=64) == (False, None)


def test_pools_of_several_kinds_keep_sglangs_answers() -> None:
    adder = make_prefill_adder(PrefillAdder, 1_000)(OtherBudget(100, 0), 64, 64, 1)
    assert adder.budget_state() is Verdict.CONTINUE
    assert adder._check_prefill_budget(None, total_tokens=60, chunk_limit=64) == (True, 64)


def test_only_what_the_settings_name_is_hooked() -> None:
    targets: list[str] = []
    hooks = SimpleNamespace(
        HookType=SimpleNamespace(AROUND="around", BEFORE="before"),
        HookRegistry=SimpleNamespace(register=lambda target, _hook, _type: targets.append(target.rsplit(".", 1)[1])),
    )
    SglangScheduling.from_environment({}).register(hooks)
    assert targets == []
    SglangScheduling.from_environment({SCHEDULING_VARIABLE: '{"admission": true}'}).register(hooks)
    assert targets == ["get_prefill_adder_class"]
    SglangScheduling.from_environment({SCHEDULING_VARIABLE: '{"policy": "fcfs"}'}).register(hooks)
    assert targets[1:] == ["__init__", "calc_priority", "_add_request_to_queue"]
