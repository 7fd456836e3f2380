"""Checkpoint in, fit, export, checkpoint out: held to transformers at both ends."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
import yaml
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file, save_file

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.rotary_scaling import ScalingConfig
from workbench import build
from workbench.cli import main
from workbench.config import resolve
from workbench.errors import UserError
from workbench.identity import identity
from workbench.model_source import ModelSource, find_model
from workbench.plan import plan
from workbench.sweep_file import read_sweep
from workbench.tracking import store_uri

TOKENS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Qwen2 of transformers' making with a BPE tokenizer of 300 tokens, `<s>` and `</s>` its BOS and EOS."""
    folder = tmp_path_factory.mktemp("source") / "qwen2"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, initializer_range=0.15, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["attention anchor rotary position window token row document"] * 50, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture
def experiment(tmp_path, tiny, source):
    """A config file that starts from `source`; settings by section on top."""

    def write(**changes: Any) -> str:
        config = {**tiny, "model": {"checkpoint": str(source)}}
        for section, settings in changes.items():
            config[section] = config.get(section, {}) | settings
        file = tmp_path / "extend.yaml"
        file.write_text(yaml.safe_dump(config))
        return str(file)

    return write


def refused(capsys, home: Path, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    assert not home.exists(), "written although the input is wrong"
    return capsys.readouterr().err


def the_run(home: Path) -> Any:
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return run


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.float()(TOKENS, use_cache=False).logits


@torch.no_grad()
def our_logits(spec: str, home: Path) -> torch.Tensor:
    model = find_model(spec, home=home).load()
    position_BT = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    return model.logits(model(TOKENS, position_BT, Borders.of(torch.ones_like(TOKENS))))


def test_training_starts_from_the_checkpoints_weights(home, experiment, source):
    """The loss before the first step is transformers' on the same rows: with a rate of nearly 0 it stays so."""
    resolved = build.check(resolve(("", yaml.safe_load(Path(experiment()).read_text()))))
    assert (resolved.shape.rope_theta, resolved.shape.max_positions, resolved.shape.attention_bias) == (5e4, 64, True)
    position_BT = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    model = build.model(dataclasses.replace(resolved, strategy=STRATEGIES["full"]))
    got = model.logits(model(TOKENS, position_BT, Borders.of(torch.ones_like(TOKENS))))
    torch.testing.assert_close(got, their_logits(source), rtol=0, atol=1e-4)
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in model.parameters())


def test_fit_extend_export_and_transformers_agree(home, experiment, source, tmp_path):
    """Longer positions, another theta and yarn are trained and carried; the run is a model source, the export too."""
    file = experiment(
        rotary={"theta": 1e5, "scaling": {"rope_type": "yarn", "factor": 4}}, model={"max_positions": 192}
    )
    assert main(["fit", file, "trainer.checkpoint_every=4"]) == 0
    run = the_run(home)
    params, run_id = run.data.params, run.info.run_id
    assert len(params["resolved.checkpoint_digest"]) == 32
    assert params["resolved.tokenizer"] == str(source) and params["data.tokenizer"] == "auto"

    out = tmp_path / "out"
    assert main(["export", run_id, str(out)]) == 0
    expected = our_logits(run_id, home)
    assert (their_logits(source) - expected).abs().max() > 0.05, "trained, and under another theta"
    torch.testing.assert_close(their_logits(out), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(our_logits(str(out), home), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(our_logits("extend", home), expected, rtol=0, atol=0)

    config = transformers.AutoConfig.from_pretrained(out)
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 1e5}
    assert wanted.items() <= config.rope_parameters.items()
    assert (config.model_type, config.max_position_embeddings, config.vocab_size) == ("qwen2", 192, 320)
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (0, 1)

    assert main(["export", run_id, str(tmp_path / "four"), "--step", "4"]) == 0
    assert (their_logits(tmp_path / "four") - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("strategy", "adds"), [("anchor", True), ("full", False)])
def test_the_exported_tokenizer_does_about_bos_what_training_did(strategy, adds, home, experiment, source, tmp_path):
    settings = {"attention": {"strategy": strategy}, "data": {"anchor": "row_start" if adds else "none"}}
    assert main(["fit", experiment(**settings), "trainer.max_steps=1"]) == 0
    run = the_run(home)
    assert main(["export", run.info.run_id, str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    text = "anchor window naïve 12"
    assert theirs(text)["input_ids"] == ([0] if adds else []) + plain.encode(text).ids
    assert theirs(text, add_special_tokens=False)["input_ids"] == plain.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("anchor", ["every_document", "none"])
def test_bytes_are_exported_as_a_tokenizer_file(anchor, home, tmp_path, tiny):
    tiny["data"]["anchor"] = anchor
    tiny["attention"] = {"strategy": "intra_document"}
    file = tmp_path / "bytes.yaml"
    file.write_text(yaml.safe_dump(tiny))
    assert main(["fit", str(file), "trainer.max_steps=1", "trainer.precision=bf16-true"]) == 0
    run_id = the_run(home).info.run_id
    assert main(["export", "bytes", str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "naïve 日本\n\t x  y <eo"
    front = [256] if anchor == "every_document" else []
    assert theirs(text)["input_ids"] == front + list(text.encode())
    assert theirs("a<eos>")["input_ids"] == [*front, 97, 257]
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 258
    loaded = find_model(run_id, home=home)
    assert loaded.tokenizer == "byte" and loaded.kind == "run"
    for name, value in loaded.load(dtype=torch.bfloat16).state_dict().items():
        assert torch.equal(model.state_dict()[f"model.{name}"], value)


@pytest.mark.slow
def test_a_trial_of_a_sweep_is_exported_and_a_changed_checkpoint_is_new_work(home, experiment, source, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    (tmp_path / "s.yaml").write_text(
        f"base: {experiment(model={'checkpoint': str(moved)})}\nset: {{trainer.max_steps: 2}}\n"
        "grid: {attention.strategy: [full, anchor]}\n"
    )

    def states() -> list[str]:
        return [trial.state for trial in plan(read_sweep(tmp_path / "s.yaml"), {}, home=home, tokenise=False).trials]

    assert states() == ["new", "new"]
    assert main(["sweep", str(tmp_path / "s.yaml")]) == 0
    assert states() == ["done", "done"]
    runs = MlflowClient(store_uri(home)).search_runs(["1"], "tags.`workbench.kind` = 'trial'")
    assert main(["export", runs[0].info.run_id, str(tmp_path / "out")]) == 0
    torch.testing.assert_close(their_logits(tmp_path / "out"), our_logits(runs[0].info.run_id, home), rtol=0, atol=1e-4)
    parent = runs[0].data.tags["mlflow.parentRunId"]
    assert main(["export", parent, str(tmp_path / "none")]) == 2

    elsewhere = tmp_path / "elsewhere"
    moved.rename(elsewhere)
    experiment(model={"checkpoint": str(elsewhere)})
    assert states() == ["done", "done"], "the place does not count"
    tensors = load_file(elsewhere / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, elsewhere / "model.safetensors", metadata={"format": "pt"})
    assert states() == ["new", "new"]


def test_the_identity_has_the_digest_and_not_the_path(experiment):
    config = resolve(("", yaml.safe_load(Path(experiment()).read_text())))
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, checkpoint="elsewhere"))

    def of(config: Any, digest: str | None) -> str:
        return identity(config, data_digest="d", device_type="cpu", checkpoint_digest=digest).config

    assert of(config, "a") == of(other, "a") != of(config, "b") != of(config, None)


def test_resuming_over_a_changed_checkpoint_is_refused(home, experiment, source, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    file = experiment(model={"checkpoint": str(copy)})
    assert main(["fit", file, "optimizer.learning_rate=1e30", "optimizer.gradient_clip_norm=null"]) == 1  # diverges
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    again = ["fit", file, "optimizer.learning_rate=1e30", "optimizer.gradient_clip_norm=null", "--resume"]
    assert main(again) == 2
    assert "model.checkpoint has other content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"preset": "tiny"}}, ["model.preset='tiny' contradict"]),
        ({"model": {"overrides": {"width": 64}}}, ["model.overrides.width=64, but the checkpoint has 32"]),
        ({"model": {"checkpoint": "nowhere"}}, ["model.checkpoint='nowhere'", "no such folder"]),
        ({"model": {"checkpoint": ""}}, ["model.checkpoint is empty"]),
        ({"model": {"max_positions": 32}}, ["data.context_length=64", "model.max_positions=32"]),
        (
            {"model": {"overrides": {"layers": 9}}, "trainer": {"precision": "16-true"}},
            ["model.overrides.layers=9", "trainer.precision='16-true' needs a GPU"],
        ),
    ],
)
def test_settings_that_do_not_fit_a_checkpoint(changes, said, capsys, home, experiment):
    if "trainer" in changes and torch.cuda.is_available():
        pytest.skip("float16 trains here")
    message = refused(capsys, home, "fit", experiment(**changes))
    assert all(part in message for part in said), message


def test_overrides_that_say_what_the_checkpoint_says_are_fine(experiment):
    file = experiment(model={"overrides": {"width": 32, "rope_theta": 2e4, "max_positions": 128}})
    shape = build.check(resolve(("", yaml.safe_load(Path(file).read_text())))).shape
    assert (shape.width, shape.rope_theta, shape.max_positions) == (32, 2e4, 128)
    assert shape.rope_scaling == ScalingConfig(rope_type="default")


def test_checkpoints_with_mistakes_are_refused_before_anything_is_written(capsys, home, experiment, source, tmp_path):
    broken = tmp_path / "broken"
    file = experiment(model={"checkpoint": str(broken)})

    def fresh() -> None:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(source, broken)

    fresh()
    (broken / "tokenizer.json").unlink()
    assert "has no tokenizer.json. Set data.tokenizer" in refused(capsys, home, "fit", file)
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-7])
    message = refused(capsys, home, "fit", file)
    assert "no whole safetensors file" in message and "tokenizer.json" in message, "both at once"
    fresh()
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, broken / "model.safetensors")
    assert "missing: model.layers.1.self_attn.q_proj.bias [32]" in refused(capsys, home, "fit", file)
    fresh()
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(capsys, home, "fit", file)
    (broken / "config.json").unlink()
    assert "no config.json" in refused(capsys, home, "fit", file)


def test_a_tokenizer_larger_than_the_checkpoints_vocabulary(capsys, home, experiment, source, tmp_path):
    large = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    large.add_tokens([f"<extra{number}>" for number in range(50)])
    large.save(str(tmp_path / "large.json"))
    message = refused(capsys, home, "fit", experiment(data={"tokenizer": str(tmp_path / "large.json")}))
    assert "the checkpoint has 320 tokens, the tokenizer 350" in message
    resolved = build.check(resolve(("", yaml.safe_load(Path(experiment(data={"tokenizer": "byte"})).read_text()))))
    assert resolved.tokenizer.vocabulary_size == 258, "bytes where they are asked for"


def test_exports_that_cannot_be(home, experiment, source, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    assert main(["export", "nothing", str(tmp_path / "out")]) == 2
    assert "no run of" in capsys.readouterr().err
    assert main(["fit", experiment(model={"checkpoint": str(copy)}), "trainer.checkpoint_every=4"]) == 0
    run_id = the_run(home).info.run_id
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("")
    for arguments, said in [
        ([run_id, str(full)], "exists and is not empty"),
        ([run_id, str(tmp_path / "out"), "--step", "3"], "has no checkpoint of step 3. It has those of step 4, 6."),
        (["0" * 32, str(tmp_path / "out")], "no run of"),
    ]:
        assert main(["export", *arguments]) == 2
        assert said in capsys.readouterr().err
    config = json.loads((copy / "tokenizer_config.json").read_text()) | {"bos_token": "</s>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["export", run_id, str(tmp_path / "out")]) == 2
    assert "no longer the tokenizer" in capsys.readouterr().err
    shutil.rmtree(home / "trials" / run_id / "checkpoints")
    assert main(["export", run_id, str(tmp_path / "out")]) == 2
    assert "has no checkpoint in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_of_models(home, experiment, source, tmp_path, monkeypatch):
    def load(spec: str) -> ModelSource:
        return find_model(spec, home=home)

    first, again, other = (load("debug").load(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    low = load("debug").load(seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(low[name], value.bfloat16()) for name, value in first.items())
    loaded = load(str(source))
    assert (loaded.kind, loaded.tokenizer, loaded.name) == ("checkpoint", str(source / "tokenizer.json"), str(source))

    with pytest.raises(UserError, match=r"no folder here, no preset \(debug, .* no run of .* no hub name"):
        load("debgu")
    with pytest.raises(UserError, match="no config"):
        load(str(tmp_path))
    with pytest.raises(UserError, match="is a file"):
        load(str(source / "config.json"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "debug")
    with pytest.raises(UserError, match="'debug' is a preset and a folder"):
        load("debug")
    assert load("./debug").kind == "checkpoint"
    (tmp_path / "debug").rename(tmp_path / "gone")

    file = experiment()
    for _ in range(2):
        assert main(["fit", file, "trainer.max_steps=1"]) == 0
    with pytest.raises(UserError, match="'extend' is the name of 2 runs"):
        load("extend")


def test_the_hub_offline_and_without_its_package(monkeypatch, home):
    import sys

    import huggingface_hub.constants

    from workbench import pretrained

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'nobody/nothing-of-this-name'.* the hub gave no such model"):
        pretrained.checkpoint_directory("nobody/nothing-of-this-name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="huggingface_hub, which is not installed"):
        pretrained.checkpoint_directory("nobody/nothing-of-this-name")
