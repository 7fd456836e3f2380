"""Layers merge in order, and every mistake is named with its key, value and way out."""

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.config import RunConfig, flatten, parse_assignments, read_yaml, resolve, to_dict
from workbench.errors import UserError


def message(*layers) -> str:
    with pytest.raises(UserError) as caught:
        resolve(*layers)
    return str(caught.value)


def test_later_layers_win():
    config = resolve(
        ("a.yaml", {"data": {"context_length": 512}, "seed": 1}),
        ("b.yaml", {"data.context_length": 1024}),
        ("command line", {"seed": 2}),
    )
    assert (config.data.context_length, config.seed) == (1024, 2)
    assert config.attention.strategy == RunConfig().attention.strategy


def test_config_survives_a_round_trip():
    config = resolve(
        ("", {"attention.strategy": "anchor", "model": {"overrides": {"layers": 2}}, "optimizer.learning_rate": 1e-3})
    )
    assert resolve(("", to_dict(config))) == config


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"data": {"contxt_length": 512}}, ["data.contxt_length", "data.context_length"]),
        ({"context_length": 512}, ["context_length is no setting", "data.context_length"]),
        ({"attention": {"strategy": "ancor"}}, ["attention.strategy", "ancor", "anchor"]),
        ({"data": {"context_length": "128K"}}, ["data.context_length", "128K", "131072"]),
        ({"data": {"context_length": 2.5}}, ["data.context_length=2.5", "whole number"]),
        ({"data": {"context_length": 1}}, ["data.context_length=1"]),
        ({"data": {"context_length": True}}, ["data.context_length=True", "whole number"]),
        ({"data": 3}, ["data is a section"]),
        ({"trainer": {"precision": "bf16"}}, ["trainer.precision='bf16' is an alias", "Write bf16-mixed."]),
        ({"trainer": {"precision": 32}}, ["trainer.precision=32 is an alias", "Write 32-true."]),
        ({"trainer": {"precision": "fp8"}}, ["trainer.precision='fp8'", "bf16-true", "transformer-engine"]),
        ({"trainer": {"max_steps": 0}}, ["trainer.max_steps=0", "at least 1"]),
        ({"optimizer": {"learning_rate": "fast"}}, ["optimizer.learning_rate='fast'", "a number"]),
        ({"name": 7}, ["name=7", "text"]),
        ({"rotary": {"precision": "low"}}, ["rotary.precision", "low_positions"]),
        ({"rotary": {"scaling": "yarn"}}, ["rotary.scaling is a section", "rotary.scaling.rope_type"]),
        ({"rotary": {"scaling": {"rope_type": "yran"}}}, ["rotary.scaling.rope_type='yran'", "yarn, llama3"]),
        ({"rotary": {"scaling": {"rope_type": "yarn"}}}, ["rotary.scaling.factor=None", "'yarn'"]),
        ({"rotary": {"scaling": {"factor": 8}}}, ["rotary.scaling.factor=8.0", "Set rotary.scaling.rope_type"]),
        ({"rotary": {"scaling": {"short_factor": [1, "a"]}}}, ["rotary.scaling.short_factor", "a list of numbers"]),
        ({"model": {"overrides": {"layrs": 2}}}, ["model.overrides.layrs", "layers"]),
    ],
)
def test_each_mistake_names_key_value_and_remedy(layer, parts):
    text = message(("f.yaml", layer))
    for part in parts:
        assert part in text, text


def test_a_mistake_in_a_file_has_its_line(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text("seed: 1\ndata:\n  tail: drop\n  contxt_length: 4\ntrainer.max_steps: many\n")
    text = message((str(file), read_yaml(file)))
    assert f"{file}:4: data.contxt_length" in text
    assert f"{file}:5: trainer.max_steps" in text


def test_what_follows_from_a_refused_value_is_no_mistake_of_its_own():
    """The type never arrives, so the factor seems to stand without one; the wrong theta is a mistake all the same."""
    text = message(("", {"rotary": {"scaling": {"rope_type": "yran", "factor": 8}, "theta": -1.0}}))
    assert len(text.splitlines()) == 2 and "rotary.scaling.rope_type='yran'" in text and "rotary.theta=-1.0" in text


def test_all_mistakes_are_reported_at_once():
    text = message(
        ("f.yaml", {"data": {"contxt_length": 1}, "trainer": {"max_steps": "many"}}),
        ("command line", {"trainer.rows_per_batch": 0, "data.validation_fraction": 2.0}),
    )
    for part in ("contxt_length", "max_steps", "trainer.rows_per_batch=0", "data.validation_fraction=2.0"):
        assert part in text, text


def test_values_on_the_command_line_are_yaml():
    assert parse_assignments(["a.b=1", "c=1e-3", "d=null", "e=x=y", "f=[1,2]", "g="]) == {
        "a.b": 1, "c": 1e-3, "d": None, "e": "x=y", "f": [1, 2], "g": "",
    }  # fmt: skip


@pytest.mark.parametrize("words", [["attention.strategy"], ["=3"], ["a=1", "a=2"], ["a={b"]])
def test_a_word_that_is_no_setting(words):
    with pytest.raises(UserError):
        parse_assignments(words)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"data: {corpus: [}\n", ":1"),
        (b"- a\n- b\n", "must hold keys and values"),
        (b"a: 1\na: 2\n", "a"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"just text", "must hold keys and values"),
    ],
)
def test_a_yaml_file_that_cannot_be_read(tmp_path, content, part):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.yaml") as caught:
        read_yaml(file)
    assert part in str(caught.value)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    assert read_yaml(tmp_path / "empty.yaml") == {}


def test_numbers_in_yaml_are_numbers(tmp_path):
    """PyYAML alone would read 1e-3 as text."""
    file = Path(tmp_path / "f.yaml")
    file.write_text("optimizer: {learning_rate: 1e-3}\n")
    assert flatten(read_yaml(file)) == {"optimizer.learning_rate": 1e-3}


def test_what_prepares_data_loads_neither_lightning_nor_mlflow():
    """They take longer to load than a small corpus takes to tokenise, and 200 MB."""
    code = (
        "import sys, workbench.cli, workbench.config, workbench.build, workbench.data_view, workbench.home; "
        "sys.exit(bool({'lightning', 'mlflow', 'torchmetrics'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reference_follows_what_it_names():
    written = ("", {"model.max_positions": "${data.context_length}", "name": "at-${data.context_length}-${seed}"})
    config = resolve(written, ("command line", {"data.context_length": 2048}))
    assert (config.model.max_positions, config.name) == (2048, "at-2048-0")
    assert "${" not in str(to_dict(config))
    assert resolve(written, ("command line", {"model.max_positions": 4096})).model.max_positions == 4096
    default = resolve(("", {"data.context_length": 64, "seed": "${trainer.max_steps}"}))
    assert default.seed == default.trainer.max_steps, "a default can be named too"


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"model.max_positions": "${data.contextlength}"}, ["data.contextlength is no setting", "data.context_length"]),
        ({"name": "${oc.env:HOME}"}, ["name=", "oc.env"]),
        ({"model.overrides": {"width": "${oc.env:HOME}"}}, ["model.overrides", "inside"]),
        ({"name": "a ${seed"}, ["without its }"]),
        ({"seed": "${name}"}, ["seed=", "whole number"]),
        (
            {"model.max_positions": "${data.context_length}", "data.context_length": "${model.max_positions}"},
            ["back to itself", "model.max_positions -> data.context_length -> model.max_positions"],
        ),
    ],
)
def test_a_reference_that_leads_nowhere_is_said(layer, parts):
    with pytest.raises(UserError) as caught:
        resolve(("", layer))
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_text_settings_take_the_words_of_the_command_line():
    words = ["name=10e2", "data.text_field=on", "optimizer.learning_rate=1e-5", "data.tokenizer=null"]
    assert parse_assignments(words) == {
        "name": "10e2", "data.text_field": "on", "optimizer.learning_rate": 1e-5, "data.tokenizer": None,
    }  # fmt: skip
