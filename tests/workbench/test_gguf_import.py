"""GGUF files written by the format's own library, imported, and held to the model that they were made of."""

import json
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


def write_gguf(file: Path, model: Any, architecture: str = "llama", **changes: Any) -> Path:
    """`changes`: add_bos, pre, drop (a tensor's name), extra (name of one more), scaling, quantised."""
    tokenizer = json.loads(backend().to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(tokenizer["vocab"]["<|begin|>"])
    writer.add_eos_token_id(tokenizer["vocab"]["<|end|>"])
    writer.add_add_bos_token(changes.get("add_bos", False))
    for name, value in model.state_dict().items():
        rows = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = pairs(rows, HEADS if "q_proj" in name else KV_HEADS)
        parts = name.removesuffix(".weight").split(".")
        theirs = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(
            ".".join(parts)
        ) or f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}"
        if (theirs == "output" and model.config.tie_word_embeddings) or theirs == changes.get("drop"):
            continue
        if changes.get("quantised") and rows.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{theirs}.weight", rows)
    if "extra" in changes:
        writer.add_tensor(changes["extra"], np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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


def test_eight_bits_become_float32_near_the_original(tmp_path: Path) -> None:
    original = their_model(True)
    file = write_gguf(tmp_path / "model.gguf", original, quantised=True)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in original.state_dict().items():
        assert (back.state_dict()[name] - value).abs().max() <= value.abs().max() / 127, name


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_tokenizer_is_the_one_it_was_made_of(add_bos: bool, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True), add_bos=add_bos)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the first 2024 windows", "naïve\n\n  日本 12.5", "it's"):
        ids = theirs(text)["input_ids"]
        assert ids == ([1] if add_bos else []) + backend().encode(text).ids
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert theirs("<|end|>", add_special_tokens=False)["input_ids"] == [0]
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin|>", "<|end|>")


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("qwen2", {}, "general.architecture='qwen2' is not supported"),
        ("llama", {"drop": "blk.1.ffn_up"}, "missing: layers.1.mlp.up_proj.weight"),
        ("llama", {"extra": "rope_freqs.weight"}, "unexpected: rope_freqs.weight"),
        ("llama", {"extra": "blk.0.ffn_gate_inp.weight"}, "unexpected: blk.0.ffn_gate_inp.weight"),
        ("llama", {"drop": "token_embd"}, "token_embd.weight is missing"),
        ("llama", {"scaling": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ("llama", {"pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe'"),
    ],
)
def test_what_would_be_lost_is_refused(
    architecture: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True), architecture, **changes)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "model.gguf", their_model(True))
    whole = file.read_bytes()
    for kept in (0, 100, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:kept])
        assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 2
        assert f"{file}: is no whole GGUF file" in capsys.readouterr().err
    assert main(["import-gguf", str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    file.write_bytes(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("")
    assert main(["import-gguf", str(file), str(tmp_path / "full")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
