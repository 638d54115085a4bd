"""The page on policies shows the stored results, and the command would run the stored settings again."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import msgspec
import pytest
from kit.documents import ROOT

from benchmarks.studies.dynamo_replay import write_arrivals
from benchmarks.studies.policies import __main__ as command
from benchmarks.studies.policies.cases import FACTORS, STANDARD, Case, make_cases
from benchmarks.studies.policies.findings import Finding
from benchmarks.studies.policies.page import BLOCKS, broken_findings, with_blocks
from benchmarks.studies.policies.plots import PLOTS, digest_of, draw
from benchmarks.studies.policies.serving import FIGURES, percentile
from benchmarks.studies.policies.study import Done, Study, decode_study, encode_study, run_study
from benchmarks.studies.policies.workloads import continued, describe, make_workload
from scheduler_components import ConfigError
from scheduler_engine.simulation import ConversationWorkload, TraceRequest, generate_conversations

PAGE = ROOT / "docs" / "explanation" / "policies.md"
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def stored() -> Study:
    return decode_study((command.FOLDER / command.RESULTS).read_bytes())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight requests in Mooncake's format."""
    path = tmp_path_factory.mktemp("study") / "trace.jsonl"
    write_arrivals(list(generate_conversations(ConversationWorkload(num_requests=8, mean_message_tokens=300.0))), path)
    return path


@pytest.fixture(scope="module")
def tiny(trace: Path) -> tuple[Study, list[Done]]:
    """The whole study with at most eight requests per run."""
    done: list[Done] = []
    return run_study(trace, num_requests=8, on_done=done.append), done


# --- the page ---


def test_the_page_has_the_tables_and_findings_of_the_stored_results(stored: Study) -> None:
    text = PAGE.read_text()
    assert with_blocks(text, stored) == text


def test_the_results_show_what_the_page_says(stored: Study) -> None:
    assert broken_findings(PAGE.read_text(), stored) == []


def test_the_page_has_each_block_and_each_plot_once() -> None:
    text = PAGE.read_text()
    assert sorted(re.findall(r"<!-- study: ([\w-]+) -->", text)) == sorted(BLOCKS)
    assert sorted(re.findall(r"\(policies/([\w-]+)\.svg\)", text)) == sorted(PLOTS)


def test_a_finding_that_results_do_not_show_is_named(stored: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "false", lambda study: Finding("All is well.", holds=False))
    page = "<!-- study: false -->\n<!-- /study -->\n<!-- study: settings -->\n<!-- /study -->\n"
    assert broken_findings(page, stored) == ["false"]


def test_only_text_between_marks_is_replaced(stored: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "new", lambda study: "new")
    page = "above\n<!-- study: new -->\nold\n<!-- /study -->\nbelow\n"
    assert with_blocks(page, stored) == "above\n<!-- study: new -->\n\nnew\n\n<!-- /study -->\nbelow\n"


# --- the stored results ---


def test_the_command_would_run_the_stored_settings(stored: Study) -> None:
    assert stored.standard == STANDARD
    assert [(run.factor, run.varied, run.fixed) for run in stored.runs] == [
        (case.factor, case.varied, case.fixed) for case in make_cases()
    ]


def test_the_command_would_generate_the_stored_workloads(stored: Study) -> None:
    generated = {name: facts for name, facts in stored.workloads.items() if name != "trace"}
    assert generated == {
        name: describe(make_workload(name, trace=Path("none"), num_requests=command.NUM_REQUESTS)) for name in generated
    }
    assert stored.workloads["trace"].num_requests == command.NUM_REQUESTS


def test_every_request_of_the_stored_runs_was_served(stored: Study) -> None:
    unserved = [
        run
        for run in stored.runs
        if (workload := {**run.fixed, **run.varied}.get("workload")) is not None
        and run.figures["finished"] + run.figures["refused"] != stored.workloads[workload].num_requests
    ]
    assert unserved == []


def test_every_figure_has_a_meaning(stored: Study) -> None:
    assert {name for run in stored.runs for name in run.figures} == set(FIGURES)


def test_stored_results_are_read_as_they_were_written(stored: Study) -> None:
    assert encode_study(stored) == (command.FOLDER / command.RESULTS).read_bytes()


def test_a_stored_run_gives_the_same_figures_today(stored: Study) -> None:
    if stored.python != ".".join(platform.python_version_tuple()[:2]):
        pytest.skip(f"the results are of Python {stored.python}")
    settings = {"preemption_policy": "latest-arrival", "kv_tokens": 25_600}
    [case] = [case for case in make_cases() if case.factor == "preemption" and case.varied == settings]
    again = run_study(Path("none"), num_requests=command.NUM_REQUESTS, cases=[case])
    assert again.runs == stored.of("preemption", **settings)


# --- a run of the whole study ---


def test_a_study_is_deterministic_and_reports_each_run(tiny: tuple[Study, list[Done]], trace: Path) -> None:
    study, done = tiny
    different = {repr(sorted(case.settings.items())) for case in make_cases()}
    assert [each.number for each in done] == list(range(1, len(different) + 1))
    assert {run.factor for run in study.runs} == {factor.name for factor in FACTORS}
    again = run_study(trace, num_requests=8, cases=list({case.factor: case for case in make_cases()}.values()))
    assert again.runs == list({run.factor: run for run in study.runs}.values())


@pytest.mark.soak_only
@pytest.mark.processes
def test_results_do_not_depend_on_the_number_of_processes(trace: Path) -> None:
    cases = [
        Case(factor="one", varied={"schedule_policy": name}, fixed={"workload": "trace"}) for name in ("fcfs", "lpm")
    ]
    alone, together = (run_study(trace, num_requests=8, cases=cases, processes=number) for number in (1, 2))
    assert encode_study(alone) == encode_study(together)


def test_equal_studies_give_equal_plots(stored: Study) -> None:
    assert draw("load", stored) == draw("load", stored)


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_small_and_of_the_stored_results(name: str, stored: Study) -> None:
    drawn = draw(name, stored)
    file = (command.FOLDER / f"{name}.svg").read_text()
    assert digest_of(stored) in file
    assert max(len(drawn), len(file)) < MOST_BYTES


def test_the_command_writes_results_plots_and_page(
    tiny: tuple[Study, list[Done]],
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "policies"
    (tmp_path / "policies.md").write_text("<!-- study: workloads -->\n<!-- /study -->\n")
    monkeypatch.setattr(command, "run_study", lambda *args, **options: tiny[0])
    monkeypatch.setattr(command, "PLOTS", ("load",))
    monkeypatch.setattr(sys, "argv", ["policy_study", str(trace), "--requests", "8", "--out", str(folder)])
    assert command.main() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["load.svg", command.RESULTS]
    text = (tmp_path / "policies.md").read_text()
    assert "| 8 |" in text
    assert with_blocks(text, decode_study((folder / command.RESULTS).read_bytes())) == text


@pytest.mark.parametrize(
    ("trace_text", "out", "problem"),
    [
        ("{}\n", "out", "trace.jsonl:1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n', "missing/out", "missing/out"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_runs(
    trace_text: str,
    out: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_text)
    monkeypatch.setattr(sys, "argv", ["policy_study", str(path), "--out", str(tmp_path / out)])
    assert command.main() == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_kept_results_must_have_the_same_conditions(tiny: tuple[Study, list[Done]], trace: Path) -> None:
    study = tiny[0]
    done: list[Done] = []
    assert run_study(trace, num_requests=8, kept=study, on_done=done.append) == study
    assert done == []
    for changed in (
        msgspec.structs.replace(study, python="2.7"),
        msgspec.structs.replace(study, standard={**study.standard, "speed": 9.0}),
        msgspec.structs.replace(study, workloads={**study.workloads, "trace": study.workloads["conversations"]}),
    ):
        with pytest.raises(ConfigError, match="differs from that of the stored results"):
            run_study(trace, num_requests=8, kept=changed)


def test_only_keeps_the_stored_results_of_equal_conditions(
    tiny: tuple[Study, list[Done]],
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "PLOTS", ())
    (tmp_path / command.RESULTS).write_bytes(encode_study(tiny[0]))
    options = ["policy_study", str(trace), "--out", str(tmp_path), "--only", "blocking", "--requests"]
    monkeypatch.setattr(sys, "argv", [*options, "8"])
    assert command.main() == 0
    assert (tmp_path / command.RESULTS).read_bytes() == encode_study(tiny[0])
    monkeypatch.setattr(sys, "argv", [*options, "7"])
    capsys.readouterr()
    assert command.main() == 2
    assert "only='workloads': differs from that of the stored results" in capsys.readouterr().err
    assert (tmp_path / command.RESULTS).read_bytes() == encode_study(tiny[0])


def test_damaged_results_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / command.RESULTS).write_text('{"python": 3')
    monkeypatch.setattr(sys, "argv", ["policy_study", "--out", str(tmp_path)])
    assert command.main() == 2
    error = capsys.readouterr().err
    assert "results" in error
    assert "are damaged" in error
    assert error.count("\n") == 1


# --- what is measured ---


def test_prompts_that_continue_earlier_ones() -> None:
    def request(index: int, *hash_ids: int) -> TraceRequest:
        length = 512 * len(hash_ids)
        return TraceRequest(index=index, arrival_s=0.0, input_length=length, output_length=1, hash_ids=hash_ids)

    requests = [request(0, 0, 1), request(1, 0, 1, 2), request(2, 0, 3, 4), request(3, 5, 1, 2)]
    assert continued(requests) == {1}
    facts = describe(requests)
    assert facts.shared_share == pytest.approx(3 / 11)
    assert facts.continued_share == 1 / 4


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 51.0, 100.0, 100.0]
    assert percentile([], 50) == 0.0
