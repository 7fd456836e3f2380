"""`workbench ui`: MLflow's page on a real store, looked at in Chromium; its start, its end and its refusals."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.saved_view import saved_views, view_address, write_saved_view
from workbench.tracking import Tracker
from workbench.ui import page_address

SWEEP = "two strategies"  # a space: keys and addresses must bear what a sweep's name may hold
CELLS = {"strategy=full": ("full", 3.25), "strategy=anchor": ("anchor", 2.75)}
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A home with a sweep of two trials, written by the tracker as a sweep writes it; nothing is trained."""
    home = tmp_path_factory.mktemp("ui") / "home"
    tracker = Tracker(home, "workbench")
    parent = tracker.create(SWEEP, {"kind": "sweep", "sweep": SWEEP})
    tracker.client.log_text(parent, "# What came out\n\nanchor wins", "report.md")
    for name, (strategy, loss) in CELLS.items():
        run = tracker.create(name, {"kind": "trial", "sweep": SWEEP}, parent=parent)
        tracker.log_params(run, {"attention.strategy": strategy, "data.context_length": 512})
        for step in range(1, 6):
            tracker.client.log_metric(run, "train/loss", loss + 1 / step, step=step)
            tracker.client.log_metric(run, "val/loss", loss + 0.5 / step - 0.1, step=step)
        tracker.close(run, status="FINISHED", outcome="completed")
    lost = tracker.create("replaced", {"kind": "trial", "sweep": SWEEP, "superseded_by": run}, parent=parent)
    for closed in (lost, parent):
        tracker.close(closed, status="FINISHED", outcome="completed")
    write_saved_view(tracker, SWEEP, ["attention.strategy"])
    return home


def descendants(pid: int) -> list[int]:
    """Processes below a process, from /proc."""
    below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return below + [further for child in below for further in descendants(child)]


@contextmanager
def page(home: Path, folder: Path, ended_by: signal.Signals):
    """Runs `workbench ui` as a user does, yields what it printed, ends it by a signal and checks that all is gone."""
    out, err = folder / "out.txt", folder / "err.txt"
    command = [sys.executable, "-m", "workbench.cli", "ui", "--port", "0"]
    with out.open("w") as to_out, err.open("w") as to_err:
        process = subprocess.Popen(
            command,
            env={**os.environ, "WORKBENCH_HOME": str(home)},
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while SWEEP not in out.read_text():
            assert process.poll() is None and time.monotonic() < deadline, out.read_text() + err.read_text()
            time.sleep(0.1)
        servers = descendants(process.pid)
        assert servers
        yield out.read_text()
        process.send_signal(ended_by)
        assert process.wait(30) == 0
        assert "Traceback" not in err.read_text()
        assert [pid for pid in servers if Path(f"/proc/{pid}").exists()] == []
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its server itself
            process.wait(30)


def port_of(printed: str) -> int:
    return int(re.search(r"ready on http://127\.0\.0\.1:(\d+)", printed).group(1))


def test_it_answers_once_it_says_so_on_this_machine_alone_and_ctrl_c_ends_it(store, tmp_path):
    with page(store, tmp_path, signal.SIGINT) as printed:
        port = port_of(printed)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(ConnectionRefusedError):  # a server on 0.0.0.0 would answer here too
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert page_address(port, "1") in printed
        assert view_address(page_address(port, "1"), f"workbench-{SWEEP}") in printed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.fixture
def browser(tmp_path):
    """Chromium without a window, which reaches this machine alone."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver on the PATH")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-dev-shm-usage"),
        *("disable-background-networking", "disable-component-update", "disable-sync", "window-size=1500,1300"),
        f"user-data-dir={tmp_path / 'chromium'}",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.browser
def test_the_page_shows_a_sweep_its_trials_and_their_numbers(store, tmp_path, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def text() -> str:
        return browser.find_element(By.TAG_NAME, "body").text

    def shown(*wanted: str) -> str:
        """The page's text, once all of these stand on it."""
        try:
            return WebDriverWait(browser, PATIENCE_SECONDS).until(lambda _: all(w in text() for w in wanted) and text())
        except Exception as error:
            raise AssertionError(f"{[w for w in wanted if w not in text()]} not on the page:\n{text()}") from error

    def click(xpath: str) -> None:
        WebDriverWait(browser, PATIENCE_SECONDS, ignored_exceptions=(Exception,)).until(
            lambda _: browser.find_element(By.XPATH, xpath).click() is None
        )

    with page(store, tmp_path, signal.SIGTERM) as printed:
        runs = page_address(port_of(printed), "1")
        browser.get(runs)
        assert not [name for name in CELLS if name in shown(SWEEP, "4 matching runs")]  # folded below the sweep
        click(f"//*[@role='row'][.//a[contains(., '{SWEEP}')]]//button")
        shown(*CELLS)
        click("//a[contains(., 'strategy=anchor')]")
        shown("attention.strategy", "data.context_length", "val/loss", "2.75", "train/loss", "2.95")

        browser.get("about:blank")
        browser.get(view_address(runs, f"workbench-{SWEEP}"))
        charts = shown("2 matching runs", *CELLS, "Parallel Coordinates", "val/loss", "train/loss")
        assert "replaced" not in charts
        browser.get("about:blank")
        browser.get(view_address(runs, f"workbench-{SWEEP}").replace("&compareRunsMode=CHART", ""))
        shown("attention.strategy", "val/loss", "2.75")

        parent = Tracker(store, "workbench").find({"kind": "sweep"})[0].info.run_id
        browser.get(runs.partition("?")[0] + f"/{parent}/artifacts/report.md")
        shown("What came out", "anchor wins")


def test_a_view_is_written_once_per_sweep_and_read_without_mlflow(tmp_path):
    tracker = Tracker(tmp_path, "workbench")
    assert saved_views(tmp_path / "mlflow.db") == []
    for _ in range(2):
        assert write_saved_view(tracker, "grid", ["attention.strategy", "data.context_length"]) == "workbench-grid"
    assert saved_views(tmp_path / "mlflow.db") == [("sweep grid", tracker.experiment_id, "workbench-grid")]
    assert saved_views(tmp_path / "nowhere.db") == []


def test_a_page_without_views_costs_the_link_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.saved_view._page_has_views", lambda: False)
    tracker = Tracker(tmp_path, "workbench")
    assert write_saved_view(tracker, "grid", ["attention.strategy"]) is None
    assert saved_views(tmp_path / "mlflow.db") == []


def test_without_a_run_it_says_what_to_do(home, capsys):
    assert main(["ui"]) == 2
    assert f"{home}/mlflow.db: there is no run yet. Run `workbench sweep`" in capsys.readouterr().err
    assert not home.exists()


def test_a_store_that_is_none_is_refused(home, capsys):
    home.mkdir()
    (home / "mlflow.db").write_text(
        "not a database, but longer than the hundred bytes that sqlite's header takes. " * 3
    )
    assert main(["ui", "--port", "0"]) == 2
    assert "is no MLflow store that can be read" in capsys.readouterr().err


def test_a_taken_port_is_refused(store, monkeypatch, capsys):
    monkeypatch.setenv("WORKBENCH_HOME", str(store))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err
    assert main(["ui", "--port", "70000"]) == 2
    assert "Choose another with --port" in capsys.readouterr().err
