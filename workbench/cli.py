"""The command line. Heavy packages load inside the commands, so that --help answers at once.

Exit codes: 0 done; 1 work failed; 2 the user's input is wrong (one message, nothing written); 130 interrupted.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; the exit code."""
    asked = _parse(arguments)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Read by GNU OpenMP when torch loads. By default waiting threads spin for milliseconds, which makes a step up to
    # twenty times slower where another process wants the cores too; microseconds are as fast on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from workbench.errors import UserError

    try:
        return int(asked.command(asked))
    except UserError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted. Run the same command again to go on.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `workbench report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Settings (key=value) may stand anywhere after the command, also behind options."""
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    if getattr(asked, "resume", None) and "=" in asked.resume:  # --resume key=value: the newest run
        rest.append(asked.resume)
        asked.resume = "newest"
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(asked, "settings")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        asked.settings = [*asked.settings, *rest]
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench",
        description="Long-context training experiments of Llama-family models, logged to MLflow.",
        epilog="State lives in $WORKBENCH_HOME, by default the checkout's runs/.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    fit = _command(commands, "fit", _fit, "train one experiment")
    fit.add_argument("config", type=Path, help="YAML of one experiment, for example sweeps/base/quickstart.yaml")
    _add_settings(fit)
    fit.add_argument(
        "--resume", nargs="?", const="newest", metavar="RUN", help="go on with a run (default: this config's newest)"
    )

    sweep = _command(commands, "sweep", _sweep, "run a grid of experiments; finished cells are skipped")
    sweep.add_argument("sweep", type=Path, help="sweep file, for example sweeps/quickstart.yaml")
    _add_settings(sweep)
    sweep.add_argument("--dry-run", action="store_true", help="show the cells and write nothing")
    sweep.add_argument("--fail-fast", action="store_true", help="stop at the first cell that fails")
    sweep.add_argument("--ignore-code", action="store_true", help="keep cells that other code finished")
    _add_json(sweep)

    show = _command(commands, "show", _show, "every setting with its value and what it may be; or rows of its data")
    show.add_argument("config", type=Path, help="YAML of one experiment")
    show.add_argument("--rows", type=int, metavar="N", help="instead: the first N training rows as the model gets them")
    _add_settings(show)
    _add_json(show)

    prepare = _command(commands, "prepare", _prepare, "tokenise a corpus and show how it packs")
    prepare.add_argument("config", type=Path, help="YAML of one experiment")
    _add_settings(prepare)
    _add_json(prepare)

    report = _command(commands, "report", _report, "a sweep's result table, from MLflow")
    report.add_argument("sweep", help="sweep file, sweep name or parent run id")
    report.add_argument("--experiment", default="workbench", help="MLflow experiment (default: workbench)")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--csv", action="store_true", help="print CSV in full precision")
    _add_json(form)

    _add_probe(commands)

    export = _command(commands, "export", _export, "write a run's weights as a Hugging Face checkpoint")
    export.description = (
        "Write a run's weights, config and tokenizer as a folder that transformers loads. Weights keep the dtype they "
        "were trained in: float32 under 32-true and the mixed precisions, bfloat16 under bf16-true."
    )
    export.add_argument("run", help="id or unique name of a fit or of a sweep's trial")
    export.add_argument("directory", type=Path, metavar="DIR", help="a new folder")
    export.add_argument("--step", type=int, metavar="N", help="checkpoint of this step (default: the newest)")

    gguf = _command(commands, "import-gguf", _import_gguf, "turn a llama.cpp file into a checkpoint directory")
    gguf.add_argument("file", type=Path, help="*.gguf of a Llama; quantised weights become float32")
    gguf.add_argument("directory", type=Path, help="a new folder")

    bench = commands.add_parser("bench", help="measure speed on this machine")
    subjects = bench.add_subparsers(required=True, metavar="SUBJECT")
    _add_bench_attention(subjects)
    _add_bench_step(subjects)
    _add_bench_data(subjects)

    ui = _command(commands, "ui", _ui, "open MLflow's page on all runs")
    ui.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 (default: 5000)")
    return parser


def _command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:]
    )
    parser.set_defaults(command=run)
    return parser


def _add_probe(commands: Any) -> None:
    probe = _command(commands, "probe", _probe, "how far RoPE is from relative in a model, at each precision")
    probe.add_argument(
        "model", help="checkpoint directory, preset (random weights), MLflow run id, or org/name of the hub"
    )
    size = probe.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one sequence, 4 shifts: under a minute for 135M parameters")
    size.add_argument("--paper", action="store_true", help="the settings of arXiv 2411.13476; hours on a CPU")
    probe.add_argument("--mode", help="propagated (default): a forward pass for each shift; shared: the rotation alone")
    probe.add_argument("--tokens", type=int, help="length of a sequence (default: 512)")
    probe.add_argument("--lengths", type=int, nargs="+", help="prefixes to report too (default: 64 128 ...)")
    probe.add_argument("--sequences", type=int, help="(default: 4)")
    probe.add_argument("--shifts", type=int, nargs="+", help="first positions to compare (default: 0 18 ... 32768)")
    probe.add_argument("--reference-shift", type=int, help="what they are compared with (default: 16)")
    probe.add_argument("--precisions", nargs="+", metavar="NAME", help="rotary.precision (default: all four)")
    probe.add_argument(
        "--dtypes", nargs="+", metavar="NAME", help="of weights and activations (default: bfloat16 float32)"
    )
    probe.add_argument(
        "--rotary-dtypes", nargs="+", metavar="NAME", help="q and k turn in these (default: the activations')"
    )
    probe.add_argument("--formats", nargs="+", metavar="NAME", help="emulated number formats, as e8m5 or tfloat32")
    probe.add_argument("--mantissa-bits", type=int, nargs="+", metavar="N", help="formats e8mN, 2 to 23")
    probe.add_argument("--rounded", nargs="+", metavar="WHAT", help="to a format: tables, rotated, both (default)")
    probe.add_argument(
        "--offsets", type=int, nargs="*", help="of packed rows whose logits are compared (default: 0 32768)"
    )
    probe.add_argument("--no-random-weights", action="store_true", help="leave out the same shape with random weights")
    probe.add_argument("--corpus", help="(default: python_stdlib)")
    probe.add_argument("--tokenizer", help="(default: the model's own; of a preset, byte)")
    probe.add_argument("--seed", type=int, help="of random weights and the choice of text (default: 0)")
    probe.add_argument("--device", help="cpu (default) or cuda")
    probe.add_argument("--max-memory", type=float, metavar="GB", help="refuse what needs more (default: the machine's)")
    _add_json(probe)


def _add_bench_attention(subjects: Any) -> None:
    bench = _command(subjects, "attention", _bench_attention, "attention alone: strategies x kernels x lengths")
    bench.add_argument("--tokens", type=int, nargs="+", help="row lengths (default: 4096 8192 16384)")
    bench.add_argument("--strategies", nargs="+", metavar="NAME", help="(default: full intra_document anchor)")
    bench.add_argument("--kernels", nargs="+", metavar="NAME", help="(default: all but reference)")
    bench.add_argument("--documents-mean", type=float, help="mean document length in tokens (default: 1000)")
    bench.add_argument("--sigma", type=float, help="spread of the log-normal lengths (default: 1)")
    bench.add_argument("--seed", type=int, help="of document lengths and inputs (default: 0)")
    bench.add_argument("--rounds", type=int, help="alternating rounds, of which medians are taken (default: 5)")
    bench.add_argument("--heads", type=int, help="(default: 8)")
    bench.add_argument("--kv-heads", type=int, help="(default: 4)")
    bench.add_argument("--head-width", type=int, help="(default: 32)")
    bench.add_argument("--dtype", help="float32 (default), bfloat16, float16 or float64")
    bench.add_argument("--device", help="cpu (default) or cuda")
    _add_bench_output(bench)


def _add_bench_step(subjects: Any) -> None:
    bench = _command(subjects, "step", _bench_step, "a whole training step, beside other libraries'")
    bench.add_argument("--tokens", type=int, default=4096, help="row length (default: 4096)")
    bench.add_argument("--rounds", type=int, default=5, help="alternating rounds, of which medians are taken")
    bench.add_argument("--strategies", nargs="+", metavar="NAME", help="(default: the four without a window)")
    bench.add_argument("--peer", action="append", metavar="NAME", help="transformers, litgpt: the same step there")
    bench.add_argument("--precisions", nargs="+", metavar="NAME", help="32-true (default), bf16-true, bf16-mixed")
    _add_bench_output(bench)


def _add_bench_data(subjects: Any) -> None:
    bench = _command(subjects, "data", _bench_data, "from documents to rows: tokenising, planning, assembling, feeding")
    bench.add_argument("--documents", type=int, default=1_000_000, help="that are planned (default: 1000000)")
    bench.add_argument("--tokens", type=int, default=20_000_000, help="that rows are made of (default: 20000000)")
    bench.add_argument("--rounds", type=int, default=5, help="rounds, of which medians are taken (default: 5)")
    _add_bench_output(bench)


def _add_bench_output(parser: Any) -> None:
    parser.add_argument("--log", action="store_true", help="write the rows to MLflow, experiment `bench`")
    _add_json(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for example attention.strategy=anchor")


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def _quiet() -> None:
    """Lightning's tips and notices say nothing that our own output does not."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")


def _fit(asked: argparse.Namespace) -> int:
    from workbench.checkpoints import newest_checkpoint
    from workbench.config import parse_assignments, read_config
    from workbench.fit import fit
    from workbench.home import trial_folder, writable_home

    _quiet()
    config = read_config(asked.config, parse_assignments(asked.settings))
    home = writable_home()
    run_id, outcome = fit(config, home=home, resume=asked.resume)
    if outcome.name == "completed":
        print(f"completed: run {run_id}, val/loss {outcome.validation_loss:.4f}.", file=sys.stderr)
        print(f"Checkpoint: {newest_checkpoint(trial_folder(home, run_id))}. Page: `workbench ui`.", file=sys.stderr)
        return 0
    print(f"{outcome.name}: run {run_id}: {outcome.reason}", file=sys.stderr)
    if outcome.name in ("cancelled", "interrupted"):
        again = " ".join(["workbench fit", str(asked.config), *asked.settings, "--resume", run_id])
        print(f"Go on with `{again}`.", file=sys.stderr)
        if newest_checkpoint(trial_folder(home, run_id)) is None:
            print(
                "It has no checkpoint yet (trainer.checkpoint_every), so it starts again from step 0.", file=sys.stderr
            )
        return 130
    return 1


def _sweep(asked: argparse.Namespace) -> int:
    from workbench.config import parse_assignments
    from workbench.home import home_directory, writable_home
    from workbench.plan import plan
    from workbench.sweep_file import read_sweep

    home = home_directory() if asked.dry_run else writable_home()
    sweep = read_sweep(asked.sweep)
    overrides = parse_assignments(asked.settings)
    make_plan = partial(plan, sweep, overrides, home=home, tokenise=not asked.dry_run, ignore_code=asked.ignore_code)
    decided = make_plan()
    if asked.dry_run:
        from workbench.sweep_table import print_plan

        _print_json(decided.to_json()) if asked.json else print_plan(decided)
        return 0

    from workbench.launchers.local import LocalLauncher
    from workbench.report import build_report
    from workbench.report_views import log_report, print_report
    from workbench.saved_view import write_saved_view
    from workbench.sweep import run_sweep
    from workbench.tracking import Tracker

    tracker = Tracker(home, decided.experiment)
    result = run_sweep(sweep, make_plan, LocalLauncher(), tracker=tracker, fail_fast=asked.fail_fast)
    report = build_report(tracker, tracker.client.get_run(result.parent))
    if result.changed:
        log_report(tracker, report)
        write_saved_view(tracker, report.sweep, report.axis_keys)
    _print_json(report.to_json()) if asked.json else print_report(report)
    print("Open the runs with `workbench ui`.", file=sys.stderr)
    return 1 if result.failed else 0


def _show_rows(asked: argparse.Namespace) -> int:
    from workbench import build
    from workbench.config import parse_assignments, read_config
    from workbench.data_view import print_report, tokenising_progress
    from workbench.errors import UserError
    from workbench.home import writable_home
    from workbench.row_view import print_rows, view_rows

    if asked.rows < 1:
        raise UserError(f"--rows {asked.rows} shows nothing. Ask for 1 or more.")
    resolved = build.check(read_config(asked.config, parse_assignments(asked.settings)))
    with tokenising_progress() as progress:
        corpus = build.corpus(resolved, writable_home(), report=progress)
    data = build.data(resolved, corpus)
    views = view_rows(data, corpus, resolved.tokenizer, count=asked.rows)
    report = build.data_report(resolved, corpus, data.training, data.validation)
    if asked.json:
        _print_json({"rows": [view.to_json() for view in views], "report": report})
        return 0
    print_rows(views, resolved.tokenizer, rows=data.training.plan.rows)
    if asked.rows > len(views):
        print(f"These are all rows: there are {len(views)}.")
    print_report(report)
    return 0


def _show(asked: argparse.Namespace) -> int:
    if asked.rows is not None:
        return _show_rows(asked)
    from workbench.config import describe_kind, flatten, parse_assignments, read_config, schema, to_dict

    config = read_config(asked.config, parse_assignments(asked.settings))
    if asked.json:
        _print_json(to_dict(config))
        return 0
    values, kinds = flatten(to_dict(config)), schema()
    for key, value in values.items():
        text = "null" if value is None else str(value)
        print(f"{key:32} {text:16} {describe_kind(kinds.get(key, type(value)))}")
    return 0


def _prepare(asked: argparse.Namespace) -> int:
    from workbench import build
    from workbench.config import parse_assignments, read_config
    from workbench.data_view import print_lengths, print_report, tokenising_progress
    from workbench.home import writable_home

    resolved = build.check(read_config(asked.config, parse_assignments(asked.settings)))
    with tokenising_progress() as progress:
        corpus = build.corpus(resolved, writable_home(), report=progress)
    report = build.data_report(resolved, corpus, *build.rows(resolved, corpus))
    if asked.json:
        _print_json(report)
        return 0
    print_lengths(corpus.lengths)
    print_report(report)
    return 0


def _report(asked: argparse.Namespace) -> int:
    from workbench.errors import UserError
    from workbench.home import home_directory
    from workbench.report import build_report, find_sweep
    from workbench.report_views import as_csv, as_markdown, log_report, print_report
    from workbench.saved_view import write_saved_view
    from workbench.tracking import Tracker

    home = home_directory()
    tracker = Tracker.existing(home, asked.experiment)
    if tracker is None:
        raise UserError(f"there is no run in {home} yet. Run `workbench sweep FILE` first.")
    report = build_report(tracker, find_sweep(tracker, asked.sweep))
    log_report(tracker, report)
    write_saved_view(tracker, report.sweep, report.axis_keys)
    if asked.json:
        _print_json(report.to_json())
    elif asked.markdown:
        print(as_markdown(report))
    elif asked.csv:
        print(as_csv(report), end="")
    else:
        print_report(report)
    return 0


def _probe(asked: argparse.Namespace) -> int:
    from dataclasses import fields

    from workbench.probe.probe import probe
    from workbench.probe.settings import PAPER, QUICK, ProbeSettings
    from workbench.probe.tables import print_probe

    given = {f.name: value for f in fields(ProbeSettings) if (value := getattr(asked, f.name, None)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if asked.mantissa_bits:
        given["formats"] = (*given.get("formats", ()), *(f"e8m{bits}" for bits in asked.mantissa_bits))
    if asked.no_random_weights:
        given["random_weights"] = False
    if asked.max_memory is not None:
        given["max_memory_gigabytes"] = asked.max_memory
    settings = ProbeSettings(**{**(QUICK if asked.quick else PAPER if asked.paper else {}), **given})
    document = probe(asked.model, settings)
    _print_json(document) if asked.json else print_probe(settings, document["rows"], document["consistency"])
    return 0


def _export(asked: argparse.Namespace) -> int:
    from workbench.export import export
    from workbench.home import home_directory

    checkpoint = export(asked.run, asked.directory, home=home_directory(), step=asked.step)
    print(f"{checkpoint} is now in {asked.directory.absolute()}.", file=sys.stderr)
    return 0


def _import_gguf(asked: argparse.Namespace) -> int:
    from workbench.gguf_import import import_gguf

    import_gguf(asked.file, asked.directory)
    print(f"Checkpoint: {asked.directory.absolute()}", file=sys.stderr)
    return 0


def _bench_attention(asked: argparse.Namespace) -> int:
    from dataclasses import fields

    # Read when torch loads: its profiler, which tells the memory, would announce itself on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from workbench.bench.attention import AttentionBench, bench_attention, print_attention

    given = {field.name: value for field in fields(AttentionBench) if (value := getattr(asked, field.name)) is not None}
    bench = AttentionBench(**given)
    rows = bench_attention(bench)
    if asked.log:
        from workbench.bench.log import log_bench

        log_bench("attention", rows, vars(bench))
    _print_json({"rows": rows}) if asked.json else print_attention(bench, rows)
    return 0


def _bench_step(asked: argparse.Namespace) -> int:
    from workbench.bench.step import DifferentLossError, bench_step, print_steps

    given = {"peers": asked.peer, "precisions": asked.precisions, "strategies": asked.strategies}
    chosen = {name: value for name, value in given.items() if value}
    try:
        rows = bench_step(tokens=asked.tokens, rounds=asked.rounds, **chosen)
    except DifferentLossError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 1
    if asked.log:
        from workbench.bench.log import log_bench

        log_bench("step", rows, {"tokens": asked.tokens, "rounds": asked.rounds, **chosen})
    _print_json({"rows": rows}) if asked.json else print_steps(rows)
    return 0


def _bench_data(asked: argparse.Namespace) -> int:
    from workbench.bench.data import bench_data, print_data

    settings = {"documents": asked.documents, "tokens": asked.tokens, "rounds": asked.rounds}
    figures = bench_data(**settings)
    if asked.log:
        from workbench.bench.log import log_bench

        log_bench("data", [figures], settings)
    _print_json(figures) if asked.json else print_data(figures)
    return 0


def _ui(asked: argparse.Namespace) -> int:
    from workbench.home import home_directory
    from workbench.ui import serve

    return serve(home_directory(), asked.port)


if __name__ == "__main__":
    sys.exit(main())
