"""GGUF files written by the format's own library, imported, and held to the model that they were made of."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from workbench.cli import main

HEADS, KV_HEADS, WIDTH = 4, 2, 64
TOKENS = torch.randint(3, 270, (2, 30), generator=torch.Generator().manual_seed(1))
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def their_model(tied: bool) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=320, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, max_position_embeddings=512, rms_norm_eps=1e-5, initializer_range=0.15,
            tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
    ).eval()  # fmt: skip


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter orders them: 2i of a head is its i-th, 2i + 1 its (D/2 + i)-th."""
    width = len(rows) // heads
    order = [
        head * width + half * (width // 2) + i for head in range(heads) for i in range(width // 2) for half in (0, 1)
    ]
    return rows[order]


def backend() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [digits, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>", "<|begin|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["anchors attend to the first token of 2024 windows"] * 9, trainer)
    return made


def write_gguf(
    file: Path,
    model: Any,
    architecture: str = "llama",
    *,
    set_: dict[str, Any] | None = None,
    drop: str = "",
    extra: str = "",
    stored: str = "F32",
    one_as: dict[str, np.ndarray] | None = None,
    big_endian: bool = False,
) -> Path:
    """A file as the converter writes it, with faults as asked.

    Args:
        file: where to.
        model: what of.
        architecture: general.architecture.
        set_: settings by key that replace or join the others; None leaves one out.
        drop: name of a tensor to leave out.
        extra: name of one more.
        stored: format of the matrices.
        one_as: values of single tensors, as they are.
        big_endian: in the other byte order.
    """
    tokenizer = json.loads(backend().to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    settings = {
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 5e5,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer["vocab"]["<|begin|>"],
        "tokenizer.ggml.eos_token_id": tokenizer["vocab"]["<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
    } | (set_ or {})
    endian = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(file, architecture, endianess=endian)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in settings.items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)
    for theirs, rows in renamed(model).items():
        if theirs == drop:
            continue
        if theirs in (one_as or {}):
            writer.add_tensor(f"{theirs}.weight", one_as[theirs])
        elif stored != "F32" and rows.ndim == 2:
            kind = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{theirs}.weight", rows)
    if extra:
        writer.add_tensor(extra, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def renamed(model: Any) -> dict[str, np.ndarray]:
    """Weights under llama.cpp's names, q and k in its order."""
    found = {}
    for name, value in model.state_dict().items():
        rows = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = pairs(rows, HEADS if "q_proj" in name else KV_HEADS)
        parts = name.removesuffix(".weight").split(".")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        theirs = top.get(".".join(parts)) or f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}"
        if theirs != "output" or not model.config.tie_word_embeddings:
            found[theirs] = rows
    return found


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_imported_model_computes_what_the_original_does(tied: bool, tmp_path: Path) -> None:
    original = their_model(tied)
    file = write_gguf(tmp_path / "model.gguf", original)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(back), logits(original), rtol=0, atol=1e-5)
    assert back.config.rms_norm_eps == 1e-5 and back.config.rope_parameters["rope_theta"] == 5e5
    assert (back.config.bos_token_id, back.config.eos_token_id, back.config.max_position_embeddings) == (1, 0, 512)


def rounded(rows: torch.Tensor, stored: str) -> torch.Tensor:
    """What the format makes of weights, by its definition: blocks of 32 values along a row with a float16 scale.

    Q8_0: value = scale * n, n = -127..127     Q4_1: value = scale * n + least, n = 0..15, both in float16
    """
    if stored in ("F16", "BF16"):
        return rows.to(torch.float16 if stored == "F16" else torch.bfloat16).float()
    blocks = rows.reshape(-1, 32).double()
    if stored == "Q8_0":
        scale = blocks.abs().amax(1, keepdim=True) / 127
        return ((blocks / scale).round() * scale.half()).reshape(rows.shape).float()
    least, most = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = (most - least) / 15
    return (((blocks - least) / scale).round() * scale.half() + least.half()).reshape(rows.shape).float()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_low_precision_becomes_float32(stored: str, tied: bool, tmp_path: Path) -> None:
    """The original with its matrices rounded by the formats' definition, which the package gguf takes no part in."""
    original = their_model(tied)
    file = write_gguf(tmp_path / "model.gguf", original, stored=stored)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {value.dtype for value in back.state_dict().values()} == {torch.float32}
    before = logits(original)
    for value in original.parameters():
        if value.ndim == 2:
            value.data = rounded(value.data, stored)
    torch.testing.assert_close(logits(back), logits(original), rtol=0, atol=1e-4)
    assert (logits(back) - before).abs().max() > 1e-3  # there was something to round


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_tokenizer_is_the_one_it_was_made_of(add_bos: bool, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True), set_={"tokenizer.ggml.add_bos_token": add_bos})
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the first 2024 windows", "naïve\n\n  日本 12.5", "it's"):
        ids = theirs(text)["input_ids"]
        assert ids == ([1] if add_bos else []) + backend().encode(text).ids
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert theirs("<|end|>", add_special_tokens=False)["input_ids"] == [0]
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin|>", "<|end|>")


def test_tokens_that_are_spelled_whole(tmp_path: Path) -> None:
    """Kinds 3 (control) and 4 (user defined) are never split; decoding may leave out the first alone."""
    parts = json.loads(backend().to_str())["model"]
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)
    changed = {
        "tokenizer.ggml.tokens": [*tokens[:-1], "<tool 2>"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 286, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in parts["merges"][:-1]],  # the last made the last token
    }
    file = write_gguf(tmp_path / "model.gguf", their_model(True), set_=changed)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    q = tokens.index("q")
    assert made("q<tool 2>q<|end|>")["input_ids"] == [q, 288, q, 0]
    assert made.decode([288, 0], skip_special_tokens=True) == "<tool 2>"


TOKENIZER = "tokenizer.ggml."
MANY_TOKENS = {
    TOKENIZER + "tokens": ["a", "b", "ab", *(f"t{i}" for i in range(397))],
    TOKENIZER + "merges": ["a b"],
    TOKENIZER + "token_type": None,
}
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "qwen2"}, "general.architecture='qwen2' is not supported"),
    ({"drop": "blk.1.ffn_up"}, "missing: layers.1.mlp.up_proj.weight"),
    ({"extra": "rope_freqs.weight"}, "unexpected: rope_freqs.weight"),
    ({"extra": "blk.0.ffn_gate_inp.weight"}, "unexpected: blk.0.ffn_gate_inp.weight"),
    ({"one_as": {"blk.0.ffn_up": np.ones((96, 32), np.float32)}}, "blk.0.ffn_up.weight is [96, 32], not [96, 64]"),
    ({"drop": "token_embd"}, "token_embd.weight is missing"),
    ({"one_as": {"blk.0.ffn_up": np.ones((96, 64), np.int32)}}, "stored as I32, which cannot be turned into float32"),
    ({"big_endian": True}, "is of the other byte order"),
    ({"set_": {"split.count": 2}}, "is one of 2 parts"),
    ({"set_": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn': not supported"),
    ({"set_": {"llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor=4.0: not supported"),
    ({"set_": {"llama.attention.sliding_window": 128}}, "llama.attention.sliding_window=128: not supported"),
    ({"set_": {"llama.attention.causal": False}}, "llama.attention.causal=False: not supported"),
    ({"set_": {"llama.attention.scale": 0.5}}, "llama.attention.scale=0.5: not supported"),
    ({"set_": {"llama.expert_count": 8}}, "llama.expert_count=8: not supported"),
    ({"set_": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count=8 differs from a head's width of 16"),
    ({"set_": {"llama.attention.head_count": 0}}, "llama.attention.head_count=0 must be at least 1"),
    ({"set_": {"llama.attention.head_count_kv": [2, 1]}}, "llama.attention.head_count_kv=[2, 1] must be a whole"),
    ({"set_": {"llama.embedding_length": "64"}}, "llama.embedding_length='64' must be a whole number"),
    ({"set_": {"llama.block_count": None}}, "llama.block_count is missing"),
    ({"set_": {"llama.rope.freq_base": -1.0}}, "rope_theta=-1.0 must be"),
    ({"set_": {TOKENIZER + "model": "llama"}}, "tokenizer.ggml.model='llama'"),
    ({"set_": {TOKENIZER + "pre": "llama-bpe"}}, "tokenizer.ggml.pre='llama-bpe'"),
    ({"set_": {TOKENIZER + "tokens": ["a", "b", "a"]}}, "tokenizer.ggml.tokens holds 1 texts twice, such as 'a'"),
    ({"set_": MANY_TOKENS}, "has 400 tokens, and the embedding 320 rows"),
    ({"set_": {TOKENIZER + "token_type": [3, 3]}}, "tokenizer.ggml.token_type tells 2 of 289 tokens' kinds"),
    ({"set_": {TOKENIZER + "merges": ["a zz"]}}, "holds 1 merges of texts that are no tokens: 'a zz'"),
    ({"set_": {TOKENIZER + "merges": None}}, "tokenizer.ggml.merges is missing"),
    ({"set_": {TOKENIZER + "eos_token_id": 320}}, "special tokens that the vocabulary does not have: eos=320"),
    ({"set_": {TOKENIZER + "bos_token_id": None}}, "tokenizer.ggml.bos_token_id is missing"),
    ({"set_": {TOKENIZER + "add_eos_token": True}}, "tokenizer.ggml.add_eos_token=True is not supported"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_what_would_be_lost_is_refused(
    fault: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True), **fault)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and str(file) in error
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_settings_that_say_nothing_are_no_fault(tmp_path: Path) -> None:
    nothing = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.vocab_size": 320,
        "llama.rope.dimension_count": 16,
        "general.url": "somewhere",
    }
    file = write_gguf(tmp_path / "model.gguf", their_model(True), set_=nothing)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0


def refused(file: Path, directory: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-gguf", str(file), str(directory)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_gguf(tmp_path / "model.gguf", their_model(True)), tmp_path / "out"
    whole = file.read_bytes()
    data = gguf.GGUFReader(file).data_offset
    for kept in (4, 23, 100, 1000, data // 2, data - 40, data, data + 1, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:kept])
        refused(file, out, f"{file}: is no whole GGUF file", capsys)
    for other in (b"", b"GG", b"PK\x03\x04 a zip"):
        file.write_bytes(other)
        refused(file, out, f"{file}: is no GGUF file", capsys)
    refused(tmp_path / "none.gguf", out, "there is no such file", capsys)
    refused(tmp_path, out, "is a folder", capsys)
    format_at = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8  # name, rank, two sizes
    file.write_bytes(whole[:format_at] + (99).to_bytes(4, "little") + whole[format_at + 4 :])
    refused(file, out, "in format 99, which the package gguf does not know", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_that_holds_something_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the file is read, which takes minutes where it is large."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("kept")
    refused(tmp_path / "none.gguf", tmp_path / "full", "exists and is not empty", capsys)
    refused(tmp_path / "none.gguf", tmp_path / "full/mine", "exists and is not empty", capsys)
    assert (tmp_path / "full/mine").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    file = write_gguf(tmp_path / "model.gguf", their_model(True))
    assert main(["import-gguf", str(file), str(tmp_path / "empty")]) == 0
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert not list(tmp_path.glob(".*"))


def test_without_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True))
    monkeypatch.setitem(sys.modules, "gguf", None)  # makes `import gguf` fail
    refused(file, tmp_path / "out", "Run `pip install 'workbench[gguf]'`", capsys)
