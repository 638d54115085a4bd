"""A session records the requested steps, each trace has one stage, and a failing profiler ends its session only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.profiler_manager import ProfileRequest, ProfilerManager, ProfileStage


class ListProfiler:
    """Notes which steps it recorded."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[int]] = {}
        self.open: list[int] | None = None
        self.error: Exception | None = None

    def start(self) -> None:
        assert self.open is None, "started twice"
        if self.error is not None:
            raise self.error
        self.open = []

    def stop(self, name: str) -> str:
        assert self.open is not None, "stopped without a start"
        assert name not in self.recorded, "a trace was written over"
        self.recorded[name], self.open = self.open, None
        if self.error is not None:
            raise self.error
        return f"/{name}"


stages = st.lists(st.sampled_from(["prefill", "decode"]), max_size=40)


def run(session: ProfilerManager, profiler: ListProfiler, steps: list[ProfileStage]) -> None:
    for number, stage in enumerate(steps):
        session.on_step_start(stage)
        if profiler.open is not None:
            profiler.open.append(number)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(8))
@given(stages, st.integers(0, 5), st.none() | st.integers(1, 8), st.booleans())
def test_exactly_the_requested_steps_are_recorded(
    steps: list[ProfileStage], start_step: int, num_steps: int | None, by_stage: bool
) -> None:
    by_stage = by_stage and num_steps is not None
    profiler = ListProfiler()
    session = ProfilerManager(profiler=profiler, rank="rank3")
    session.start(ProfileRequest("p", start_step, num_steps, by_stage))
    run(session, profiler, steps)
    paths = session.stop()
    assert paths == tuple(f"/{name}" for name in profiler.recorded)
    assert not session.is_recording and profiler.open is None
    recorded = sorted(step for trace in profiler.recorded.values() for step in trace)
    after = range(start_step, len(steps))
    if by_stage:
        wanted = {
            stage: [step for step in after if steps[step] == stage][:num_steps] for stage in ("prefill", "decode")
        }
        assert recorded == sorted(wanted["prefill"] + wanted["decode"])
        for name, trace in profiler.recorded.items():
            assert {steps[step] for step in trace} == {name.split("-")[2]}
    else:
        assert recorded == list(after)[:num_steps]
        assert set(profiler.recorded) <= {"p-rank3"}


def test_only_one_session_is_open_at_a_time() -> None:
    profiler = ListProfiler()
    session = ProfilerManager(profiler=profiler)
    session.start(ProfileRequest("one", num_steps=1))
    with pytest.raises(ConfigError, match="stop the open session"):
        session.start(ProfileRequest("two"))
    run(session, profiler, ["decode"] * 3)
    session.start(ProfileRequest("two"))  # the first came to its end by itself
    run(session, profiler, ["decode"])
    assert session.stop() == ("/two-0",)
    assert session.stop() == ("/two-0",)  # asked again: the same traces
    assert session.state() == {"profiler_is_recording": False, "profiler_traces": 2}


@pytest.mark.parametrize("fails_at", ["start", "stop"])
def test_a_profiler_that_fails_ends_its_session_and_no_step(fails_at: str) -> None:
    profiler = ListProfiler()
    session = ProfilerManager(profiler=profiler)
    session.start(ProfileRequest("p", num_steps=1))
    if fails_at == "stop":
        session.on_step_start("decode")
    profiler.error = RuntimeError("no room")
    for _ in range(3):
        session.on_step_start("decode")
    assert (session.num_traces, session.failures.total, session.is_recording) == (0, 1, False)
    profiler.error = None
    session.start(ProfileRequest("again"))


@pytest.mark.parametrize(
    ("field", "plan"),
    [
        ("profile_id", ProfileRequest("../etc/passwd")),
        ("profile_id", ProfileRequest("")),
        ("profile_id", ProfileRequest("a\n")),
        ("start_step", ProfileRequest(start_step=-1)),
        ("num_steps", ProfileRequest(num_steps=0)),
        ("num_steps", ProfileRequest(profile_by_stage=True)),
    ],
)
def test_an_invalid_request_is_rejected_by_field_name(field: str, plan: ProfileRequest) -> None:
    with pytest.raises(ConfigError) as refusal:
        ProfilerManager().start(plan)
    assert refusal.value.field == field


@pytest.mark.parametrize("by_stage", [False, True])
def test_a_second_session_of_one_name_overwrites_no_trace(by_stage: bool) -> None:
    profiler = ListProfiler()
    session = ProfilerManager(profiler=profiler, rank="rank0")
    for _ in range(3):
        session.start(ProfileRequest(num_steps=1, profile_by_stage=by_stage))
        run(session, profiler, ["prefill", "decode", "prefill"])
        session.stop()
    names = list(profiler.recorded)
    assert len(names) == len(set(names)) == 3 * (1 + by_stage)
    first = "profile-rank0-prefill-0" if by_stage else "profile-rank0"
    assert [name for name in names if name.startswith(first)] == [first, f"{first}-2", f"{first}-3"]
