"""The report against a real store with numbers put there by hand."""

import csv
import io
import json
import statistics
from pathlib import Path

import pytest

from workbench.errors import UserError
from workbench.report import build_report, find_sweep
from workbench.report_views import as_csv, as_markdown, log_report
from workbench.tracking import Tracker

GPU, CPU = "NVIDIA H200", "some processor"


@pytest.fixture
def tracker(tmp_path):
    return Tracker(tmp_path / "home", "e")


@pytest.fixture
def parent(tracker):
    axes = json.dumps(["data.context_length", "attention.strategy"])
    run = tracker.create("grid", {"kind": "sweep", "sweep": "grid", "axes": axes})
    return tracker.client.get_run(run)


def trial(tracker, parent, length, strategy, *, seed=0, loss=1.0, speeds=(1, 100, 120, 110), kernel="sdpa",
          device=CPU, status="FINISHED", outcome="completed", **tags) -> str:  # fmt: skip
    axes = {"data.context_length": length, "attention.strategy": strategy}
    run = tracker.create(
        f"{length} {strategy}",
        {"kind": "trial", "sweep": "grid", "axes": json.dumps(axes), "seed": str(seed), "kernel": kernel,
         "device_name": device, **tags},
        parent=parent.info.run_id,
    )  # fmt: skip
    for step, speed in enumerate(speeds, start=1):
        tracker.client.log_metric(run, "throughput/tokens_per_second", speed, step=step)
        tracker.client.log_metric(run, "attention/visible_pair_share", 0.25 * (1 + step % 2), step=step)
    tracker.client.log_metric(run, "val/loss", 9.0, step=0)
    tracker.client.log_metric(run, "val/loss", loss, step=4)
    tracker.close(run, status=status, outcome=outcome)
    return run


def row(report, length, strategy):
    (found,) = [r for r in report.rows if r.axes == {"data.context_length": length, "attention.strategy": strategy}]
    return found


def test_mean_and_spread_over_seeds(tracker, parent):
    losses = [1.0, 1.5, 1.1]
    for seed, loss in enumerate(losses):
        trial(tracker, parent, 512, "anchor", seed=seed, loss=loss)
    found = row(build_report(tracker, parent), 512, "anchor")
    assert found.seeds == [0, 1, 2]
    assert found.metrics["val/loss"].mean == pytest.approx(1.2)
    assert found.metrics["val/loss"].std == pytest.approx(statistics.stdev(losses))


def test_speed_is_the_median_without_the_first_point_and_share_the_mean(tracker, parent):
    trial(tracker, parent, 512, "full", speeds=(1, 100, 120, 110))
    found = row(build_report(tracker, parent), 512, "full")
    assert found.metrics["throughput/tokens_per_second"].mean == 110
    assert found.metrics["attention/visible_pair_share"].mean == pytest.approx(0.375)


def test_speed_up_over_full_at_the_same_other_axes(tracker, parent):
    trial(tracker, parent, 512, "full", speeds=(1, 100))
    trial(tracker, parent, 512, "anchor", speeds=(1, 150))
    trial(tracker, parent, 2048, "full", speeds=(1, 10))
    trial(tracker, parent, 2048, "anchor", speeds=(1, 40))
    report = build_report(tracker, parent)
    assert row(report, 512, "anchor").speed_up == pytest.approx(1.5)
    assert row(report, 2048, "anchor").speed_up == pytest.approx(4.0)
    assert row(report, 2048, "full").speed_up == 1.0


@pytest.mark.parametrize(
    ("full", "anchor", "reason"),
    [
        ({"kernel": "flash"}, {"kernel": "sdpa"}, "kernel differs: sdpa, full flash"),
        ({"device": GPU}, {"device": CPU}, f"device differs: {CPU}, full {GPU}"),
        ({"outcome": "oom", "status": "FAILED"}, {}, "full did not complete"),
        ({}, {"outcome": "oom", "status": "FAILED"}, "not completed"),
        (None, {}, "no full attention at context_length=512"),
    ],
)
def test_a_speed_up_that_means_nothing_stays_blank_with_its_reason(tracker, parent, full, anchor, reason):
    if full is not None:
        trial(tracker, parent, 512, "full", **full)
    trial(tracker, parent, 512, "anchor", **anchor)
    found = row(build_report(tracker, parent), 512, "anchor")
    assert (found.speed_up, found.speed_up_blank) == (None, reason)
    assert reason in as_markdown(build_report(tracker, parent))


def test_failures_are_results_and_superseded_runs_are_not(tracker, parent):
    trial(tracker, parent, 512, "anchor", seed=0, outcome="oom", status="FAILED")
    trial(tracker, parent, 512, "anchor", seed=1, loss=2.0)
    trial(tracker, parent, 512, "anchor", seed=1, loss=7.0, superseded_by="another")
    found = row(build_report(tracker, parent), 512, "anchor")
    assert found.outcome == "completed 1, oom 1"
    assert (found.metrics["val/loss"].mean, found.metrics["val/loss"].count) == (2.0, 1)


def test_rows_stand_in_the_axes_order_and_lengths_by_size(tracker, parent):
    for length in (2048, 512, 16384):
        for strategy in ("anchor", "full", "intra_document"):
            trial(tracker, parent, length, strategy, speeds=(1,))
    order = [tuple(r.axes.values()) for r in build_report(tracker, parent).rows]
    assert order == [
        (length, strategy) for length in (512, 2048, 16384) for strategy in ("full", "intra_document", "anchor")
    ]


def test_written_forms_agree_with_the_report(tracker, parent, tmp_path):
    trial(tracker, parent, 512, "full", loss=1.23456789)
    report = build_report(tracker, parent)
    (line,) = csv.DictReader(io.StringIO(as_csv(report)))
    assert float(line["val/loss mean"]) == 1.23456789
    assert (line["data.context_length"], line["attention.strategy"], line["outcome"]) == ("512", "full", "completed")
    assert "| 512 | full | 1.2346 |" in as_markdown(report)
    assert json.loads(json.dumps(report.to_json()))["rows"][0]["metrics"]["val/loss"]["mean"] == 1.23456789
    log_report(tracker, report)
    names = {artifact.path for artifact in tracker.client.list_artifacts(parent.info.run_id)}
    assert names == {"report.md", "report.csv", "report.json", "report.png"}
    image = tracker.client.download_artifacts(parent.info.run_id, "report.png", str(tmp_path))
    assert Path(image).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_sweep_is_found_by_file_name_or_id(tracker, parent, tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("grid: {attention.strategy: [full]}\n")
    for wanted in (str(file), "grid", parent.info.run_id):
        assert find_sweep(tracker, wanted).info.run_id == parent.info.run_id
    with pytest.raises(UserError, match="There are: grid"):
        find_sweep(tracker, "other")
