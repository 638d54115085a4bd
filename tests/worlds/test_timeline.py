"""Events in order of their time, and a history that depends on nothing but its seed."""

from __future__ import annotations

from worlds import Timeline


def test_actions_happen_in_order_and_the_time_ends_where_it_was_asked_to() -> None:
    timeline, happened = Timeline(seed=0), list[tuple[str, float]]()
    timeline.after(2.0, lambda: happened.append(("late", timeline.now_s)))
    timeline.after(1.0, lambda: happened.append(("early", timeline.now_s)))
    timeline.at(1.0, lambda: happened.append(("equal", timeline.now_s)))
    timeline.after(3.1, lambda: happened.append(("never", timeline.now_s)))
    timeline.run_until(3.0)
    assert happened == [("early", 1.0), ("equal", 1.0), ("late", 2.0)]
    assert (timeline.now_s, timeline.num_events) == (3.0, 4)


def test_the_history_has_a_digest_and_its_last_lines() -> None:
    def digest(seed: int, *lines: str) -> str:
        timeline = Timeline(seed=seed)
        for line in lines:
            timeline.record(line)
        return timeline.digest

    assert digest(1, "a", "b") == digest(1, "a", "b")
    assert len({digest(1, "a", "b"), digest(2, "a", "b"), digest(1, "b", "a"), digest(1, "a")}) == 4
    timeline = Timeline(seed=1)
    for number in range(100):
        timeline.record(f"event {number}")
    assert timeline.last_events[-1] == "0.000000 event 99"
    assert len(timeline.last_events) == 24
