"""Cells of a sweep file: counts, names, exclusion, and every mistake named."""

import itertools
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UserError
from workbench.sweep_file import accumulation, read_sweep


def sweep(tmp_path, text, name="s.yaml"):
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return read_sweep(file)


def test_literal_cells(tmp_path):
    cells = list(
        sweep(
            tmp_path,
            """
            grid:
              data.context_length: [512, 2048]
              attention.strategy: [full, anchor]
            seeds: [0, 1]
            exclude:
              - {when: {data.context_length: ">=2048", attention.strategy: full}, why: too slow}
            """,
        ).cells()
    )
    assert [(cell.name, cell.excluded_why) for cell in cells] == [
        ("context_length=512 strategy=full seed=0", None),
        ("context_length=512 strategy=full seed=1", None),
        ("context_length=512 strategy=anchor seed=0", None),
        ("context_length=512 strategy=anchor seed=1", None),
        ("context_length=2048 strategy=full seed=0", "too slow"),
        ("context_length=2048 strategy=full seed=1", "too slow"),
        ("context_length=2048 strategy=anchor seed=0", None),
        ("context_length=2048 strategy=anchor seed=1", None),
    ]
    assert cells[2].axes == {"data.context_length": 512, "attention.strategy": "anchor"}
    assert cells[2].label == "512 anchor seed=0"


def test_zip_is_one_axis(tmp_path):
    cells = list(
        sweep(
            tmp_path,
            """
            grid: {attention.strategy: [full, anchor]}
            zip:
              - {data.context_length: [512, 1024], trainer.rows_per_batch: [4, 2]}
            """,
        ).cells()
    )
    assert [tuple(cell.axes.values()) for cell in cells] == [
        ("full", 512, 4), ("full", 1024, 2), ("anchor", 512, 4), ("anchor", 1024, 2),
    ]  # fmt: skip


def test_a_section_may_be_nested(tmp_path):
    flat = sweep(tmp_path, "grid: {data.context_length: [4, 8]}")
    nested = sweep(tmp_path, "grid: {data: {context_length: [4, 8]}}")
    assert [cell.axes for cell in flat.cells()] == [cell.axes for cell in nested.cells()]


@given(
    lengths=st.lists(st.integers(2, 99999), min_size=1, max_size=4, unique=True),
    strategies=st.lists(st.sampled_from(["full", "anchor", "intra_document"]), min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
)
def test_cells_are_the_product_and_unique(tmp_path_factory, lengths, strategies, seeds):
    text = f"grid: {{data.context_length: {lengths}, attention.strategy: {strategies}}}\nseeds: {seeds}\n"
    cells = list(sweep(tmp_path_factory.mktemp("s"), text).cells())
    points = {(*cell.axes.values(), cell.seed) for cell in cells}
    assert points == set(itertools.product(lengths, strategies, seeds))
    assert len(cells) == len(points) == len({cell.name for cell in cells})


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        ("512", [512]),
        ("[512, 1024]", [512, 1024]),
        ('">512"', [1024, 2048]),
        ('"<=1024"', [512, 1024]),
        ('"!=512"', [1024, 2048]),
    ],
)
def test_conditions_compare(tmp_path, condition, matching):
    text = f"""
        grid: {{data.context_length: [512, 1024, 2048], attention.strategy: [full, anchor]}}
        exclude: [{{when: {{data.context_length: {condition}, attention.strategy: full}}, why: no}}]
    """
    excluded = [cell.axes for cell in sweep(tmp_path, text).cells() if cell.excluded_why]
    assert [axes["data.context_length"] for axes in excluded] == matching
    assert {axes["attention.strategy"] for axes in excluded} == {"full"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("grid: {}", ["grid is empty"]),
        ("set: {seed: 1}", ["grid is empty"]),
        ("grid: {data.context_length: []}", ["data.context_length is empty"]),
        ("grid: {data.contextlength: [512]}", ["data.contextlength", "data.context_length"]),
        ("grid: {data.context_length: 512}", ["data.context_length=512", "list"]),
        ("grid: {data.context_length: [512, 512]}", ["stands twice"]),
        ("grid: {seed: [0, 1]}", ["seeds"]),
        ("gird: {data.context_length: [512]}", ["gird", "grid"]),
        ("grid: {seeds: [0]}\nseeds: [0]", ["seeds"]),
        ("grid: [a]", ["grid"]),
        ("grid: {attention.strategy: [full]}\nseeds: 3", ["seeds=3"]),
        ("grid: {attention.strategy: [full]}\nseeds: [1, 1]", ["seeds"]),
        ("grid: {attention.strategy: [full]}\nbase: nowhere.yaml", ["nowhere.yaml", "cannot be read"]),
        ("zip: [{data.context_length: [1, 2], trainer.rows_per_batch: [1]}]", ["equally many"]),
        ("grid: {attention.strategy: [full]}\nexclude: [{when: {data.tail: pad}, why: x}]", ["data.tail is no axis"]),
        ("grid: {attention.strategy: [full]}\nexclude: [{when: {attention.strategy: full}}]", ["exclude"]),
        ("grid: {attention.strategy: [full]}\nexclude: [{when: {attention.strategy: full}, why: x}]", ["no cell"]),
        ("grid: {attention.strategy: [full]}\nhold: {tokens: 4}", ["hold"]),
        ("grid: {attention.strategy: [full]}\nname: 'a/b'", ["name"]),
        ("grid: {attention.strategy: [full]}\nzip: [{attention.strategy: [full]}]", ["axis twice"]),
    ],
)
def test_each_mistake_is_named_with_its_file(tmp_path, text, parts):
    with pytest.raises(UserError) as caught:
        sweep(tmp_path, text)
    for part in ("s.yaml", *parts):
        assert part in str(caught.value), str(caught.value)


def test_accumulation_holds_tokens_per_step():
    assert accumulation(8192, tokens_per_batch=1024) == 8
    with pytest.raises(ValueError, match=r"hold\.tokens_per_step=1000"):
        accumulation(1000, tokens_per_batch=512)


def test_rules_and_included_points(tmp_path):
    cells = list(
        sweep(
            tmp_path,
            """
            grid: {data.context_length: [512, 2048], attention.strategy: [full, anchor]}
            exclude: [{when: {data.context_length: ">=2048", attention.strategy: full}, why: slow}]
            rules:
              - {when: {data.context_length: ">=2048"}, set: {trainer.rows_per_batch: 1}}
              - {when: {attention.strategy: anchor}, set: {trainer.rows_per_batch: 4, data.tail: pad}}
            include:
              - {attention.strategy: full, data.context_length: 4096}
            """,
        ).cells()
    )
    assert [(cell.label, cell.settings, cell.excluded_why) for cell in cells] == [
        ("512 full", {}, None),
        ("512 anchor", {"trainer.rows_per_batch": 4, "data.tail": "pad"}, None),
        ("2048 full", {"trainer.rows_per_batch": 1}, "slow"),
        ("2048 anchor", {"trainer.rows_per_batch": 4, "data.tail": "pad"}, None),
        ("4096 full", {"trainer.rows_per_batch": 1}, None),
    ]


def test_options(tmp_path):
    read = sweep(
        tmp_path,
        """
        grid: {data.context_length: [512, 2048], attention.strategy: [full, anchor]}
        resources: {cpus: 2, gpus: 1}
        limits: {timeout: 90m, retries: {crash: 1}}
        objective: {metric: val/perplexity}
        report: {rows: attention.strategy, columns: data.context_length, values: [val/loss]}
        """,
    )
    assert (read.resources.cpus, read.resources.gpus, read.limits.timeout_seconds) == (2, 1, 5400.0)
    assert (read.objective.metric, read.objective.mode) == ("val/perplexity", "min")
    assert (read.pivot.rows, read.pivot.values) == ("attention.strategy", ("val/loss",))
    again = {name: read.limits.tries_again(name, 1) for name in ("crash", "lost", "host_oom", "oom", "diverged")}
    assert again == {"crash": True, "lost": True, "host_oom": True, "oom": False, "diverged": False}
    assert not read.limits.tries_again("crash", 2) and read.limits.tries_again("lost", 3)
    assert not read.limits.tries_again("lost", 4)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("resources: {cpu: 1}", ["resources.cpu", "cpus"]),
        ("resources: {cpus: 0}", ["resources.cpus=0"]),
        ("limits: {timeout: soon}", ["limits.timeout='soon'", "30m"]),
        ("limits: {timeout: -5}", ["limits.timeout=-5"]),
        ("limits: {retries: {crashes: 1}}", ["limits.retries.crashes", "crash"]),
        ("limits: {retries: {crash: -1}}", ["limits.retries.crash=-1"]),
        ("objective: {mode: best}", ["objective.mode='best'"]),
        ("report: {rows: data.tail}", ["report.rows='data.tail'", "no axis"]),
        ("rules: [{when: {data.tail: pad}, set: {seed: 1}}]", ["rules.when", "data.tail is no axis"]),
        ("rules: [{when: {attention.strategy: full}, set: {a.b: 1}}]", ["a.b is no setting"]),
        ("rules: [{when: {attention.strategy: full}, set: {attention.strategy: anchor}}]", ["is an axis"]),
        ("hold: {tokens_per_step: 64}\nrules: [{when: {seed: 0}, set: {trainer.accumulate: 2}}]", ["hold"]),
        ("include: [{data.context_length: 8}]", ["attention.strategy", "Name every axis"]),
        ("include: [{attention.strategy: full}]", ["stands twice"]),
    ],
)
def test_each_mistake_in_an_option_is_named(tmp_path, text, parts):
    with pytest.raises(UserError) as caught:
        sweep(tmp_path, f"grid: {{attention.strategy: [full, anchor]}}\n{text}\n")
    for part in ("s.yaml", *parts):
        assert part in str(caught.value), str(caught.value)
