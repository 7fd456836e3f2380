"""The Llama held to Hugging Face's with the same weights, and to what its strategies promise about documents."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import modules.llama
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig, parameter_count
from modules.rotary import RotaryConfig

TOKENS, VOCABULARY = 24, 97
POLICIES = ("float32_scores", "float32", "compute", "low_positions")


def shape(**changes: Any) -> LlamaConfig:
    defaults: dict[str, Any] = dict(
        vocabulary_size=VOCABULARY, width=48, layers=3, heads=6, kv_heads=2, head_width=8, hidden_width=112,
        norm_epsilon=1e-5, tied_embeddings=False, rope_theta=10_000.0, max_positions=512,
    )  # fmt: skip
    return LlamaConfig(**(defaults | changes))


def build(
    config: LlamaConfig, strategy: str = "full", *, kernel: str = "reference", precision: str = "float32", seed: int = 0
) -> Llama:
    torch.manual_seed(seed)
    rotary = RotaryConfig(precision=precision)  # type: ignore[arg-type]
    return Llama(config, strategy=STRATEGIES[strategy], kernel=kernel, rotary=rotary)


def logits(model: Llama, tokens_BT: Tensor, document_BT: Tensor, position_BT: Tensor | None = None) -> Tensor:
    if position_BT is None:
        position_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return model.logits(model(tokens_BT, position_BT, Borders.of(document_BT)))


def random_tokens(rows: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def hugging_face(config: LlamaConfig, **changes: Any) -> transformers.LlamaForCausalLM:
    """Their model with random weights of a width that gives logits of about 1, so that 1e-5 means something."""
    c = config
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocabulary_size, hidden_size=c.width, intermediate_size=c.hidden_width,
            num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
            head_dim=c.head_width, rms_norm_eps=c.norm_epsilon, tie_word_embeddings=c.tied_embeddings,
            max_position_embeddings=c.max_positions, initializer_range=0.15, attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, **changes,
        )
    ).eval()  # fmt: skip


def with_weights_of(theirs: transformers.LlamaForCausalLM, ours: Llama) -> Llama:
    weights = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    if ours.lm_head is None:
        del weights["lm_head.weight"]
    ours.load_state_dict(weights)
    return ours


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1], ids=["mha", "gqa", "mqa"])
def test_logits_and_gradients_equal_hugging_face(kv_heads: int, tied: bool, kernel: str) -> None:
    config = shape(kv_heads=kv_heads, tied_embeddings=tied, rope_theta=5e5)
    theirs = hugging_face(config)
    ours = with_weights_of(theirs, build(config, kernel=kernel))
    tokens = random_tokens(2, TOKENS)
    position = torch.arange(TOKENS).expand_as(tokens) + torch.tensor([[0], [300]])

    expected = theirs(tokens, position_ids=position, use_cache=False).logits
    got = logits(ours, tokens, torch.ones_like(tokens), position)
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)

    for result in (expected, got):
        F.cross_entropy(result[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    their_gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    our_gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(
            gradient, their_gradients[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("strategy", "visible"),
    [
        ("full", lambda q, k, document: True),
        ("intra_document", lambda q, k, document: document[q] == document[k]),
        ("anchor", lambda q, k, document: document[q] == document[k] or document[k] == 0),
    ],
)
def test_every_strategy_equals_hugging_face_under_an_explicit_mask(strategy: str, visible: Any) -> None:
    document = [0] + [1] * 7 + [2] * 1 + [3] * 11
    allowed = torch.tensor([[k <= q and visible(q, k, document) for k in range(20)] for q in range(20)])
    theirs = hugging_face(shape())
    tokens = random_tokens(1, 20)
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    expected = theirs(tokens, attention_mask=mask, position_ids=torch.arange(20)[None], use_cache=False).logits
    for kernel in ("reference", "sdpa"):
        ours = with_weights_of(theirs, build(shape(), strategy, kernel=kernel))
        torch.testing.assert_close(logits(ours, tokens, torch.tensor([document])), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_does_not_read_another_one(strategy: str, kernel: str) -> None:
    """Changing one token of document 1 leaves document 2's logits bit for bit, but for full attention."""
    if kernel == "sdpa" and STRATEGIES[strategy].window is not None:
        pytest.skip("the sdpa kernel has no windows")
    anchor = STRATEGIES[strategy].anchor
    document = torch.tensor([([0] if anchor else []) + [1] * 9 + [2] * 6])
    model = build(shape(), strategy, kernel=kernel)
    tokens = random_tokens(1, document.shape[1])
    before = logits(model, tokens, document)
    tokens[0, 4] = (tokens[0, 4] + 1) % VOCABULARY
    after = logits(model, tokens, document)

    changed = (before != after).any(-1)
    assert changed[0, 4] and not changed[0, :4].any()
    assert changed[document == 2].all() if strategy == "full" else not changed[document == 2].any()


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_every_document_reads_the_shared_anchor(kernel: str) -> None:
    document = torch.tensor([[0] + [1] * 9 + [2] * 6])
    model = build(shape(), "anchor", kernel=kernel)
    tokens = random_tokens(1, 16)
    before = logits(model, tokens, document)
    tokens[0, 0] = (tokens[0, 0] + 1) % VOCABULARY
    assert (logits(model, tokens, document) != before).any(-1).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_positions_may_restart_in_isolated_documents(dtype: torch.dtype, tolerance: float) -> None:
    """Scores depend on distance only, so continuous and restarted positions agree up to rounding."""
    document = torch.tensor([[1] * 9 + [2] * 200 + [3] * 6])
    restarted = torch.cat([torch.arange(n) for n in (9, 200, 6)])[None]
    tokens = random_tokens(1, 215)
    model = with_weights_of(hugging_face(shape()), build(shape(), "intra_document")).to(dtype)
    reset = with_weights_of(hugging_face(shape()), build(shape(), "intra_document_reset")).to(dtype)
    expected = logits(model, tokens, document)
    torch.testing.assert_close(logits(reset, tokens, document, restarted), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_an_anchor_in_front_of_every_document_equals_the_shared_one(kernel: str) -> None:
    """The same computation written twice, given the same positions for the other tokens.

    shared  A a a a b b b b        copies  A a a a A b b b b
            0 1 2 3 4 5 6 7                0 1 2 3 0 4 5 6 7
    """
    model = with_weights_of(hugging_face(shape()), build(shape(), "anchor", kernel=kernel)).double()
    tokens = random_tokens(1, 8)
    shared = logits(model, tokens, torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2]]))
    source = [0, 1, 2, 3, 0, 4, 5, 6, 7]
    document = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    copies = logits(model, tokens[:, source], document, torch.tensor([source]))
    torch.testing.assert_close(copies, shared[:, source], rtol=0, atol=1e-12)


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("precision", POLICIES)
def test_dtypes_that_reach_attention(precision: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real attention runs; only what it is handed, and whether autocast is on, is written down."""
    seen: list[Any] = []
    real = modules.llama.attend

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **settings: Any) -> Tensor:
        out = real(q, k, v, *args, **settings)
        seen.append((q.dtype, k.dtype, v.dtype, out.dtype, torch.is_autocast_enabled("cpu")))
        return out

    monkeypatch.setattr(modules.llama, "attend", spy)
    model = build(shape(), "anchor", kernel="sdpa", precision=precision)
    if setting == "bfloat16":
        model.bfloat16()
    projected: list[torch.dtype] = []
    model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: projected.append(inputs[0].dtype))
    document = torch.tensor([[0, 1, 1, 2, 2]])
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        hidden = model(random_tokens(1, 5), torch.arange(5)[None], Borders.of(document))

    compute = torch.float32 if setting == "float32" else torch.bfloat16
    handed = torch.float32 if precision == "float32_scores" else compute
    assert seen == [(handed, handed, handed, handed, False)] * 3
    assert projected == [compute]
    assert hidden.dtype == (torch.bfloat16 if setting == "bfloat16" else torch.float32)


@pytest.mark.parametrize("setting", ["bfloat16", "autocast"])
@pytest.mark.parametrize("precision", POLICIES)
def test_tables_survive_a_cast_of_the_model(precision: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the float32 policies the same bits before and after; under the others bfloat16, made once per forward."""
    made: list[Any] = []
    real = modules.llama.rotary_tables

    def spy(*args: Any, **settings: Any) -> Any:
        made.append(real(*args, **settings))
        return made[-1]

    monkeypatch.setattr(modules.llama, "rotary_tables", spy)
    model = build(shape(), precision=precision)
    inputs = random_tokens(1, 5), torch.arange(1000, 1005)[None], Borders.of(torch.ones(1, 5, dtype=torch.int32))
    model(*inputs)
    if setting == "bfloat16":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        model(*inputs)
    before, after = made
    if precision in ("float32_scores", "float32"):
        assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, after, strict=True))
    else:
        assert {x.dtype for x in after} == {torch.bfloat16}


def test_theta_of_the_rotary_setting_wins() -> None:
    config, tokens, document = shape(rope_theta=1e4), random_tokens(1, 9), torch.ones(1, 9, dtype=torch.int32)
    torch.manual_seed(0)
    other = Llama(config, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig(theta=1e6))
    assert other.theta == 1e6
    same = build(shape(rope_theta=1e6))
    assert torch.equal(logits(other, tokens, document), logits(same, tokens, document))
    assert not torch.equal(logits(other, tokens, document), logits(build(config), tokens, document))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_builds_on_the_meta_device_and_counts_its_parameters(tied: bool) -> None:
    config = shape(tied_embeddings=tied, head_width=10)
    with torch.device("meta"):
        model = build(config)
    parameters = list(model.parameters())
    assert all(p.is_meta for p in parameters) and not list(model.buffers())
    assert parameter_count(config) == sum(p.numel() for p in parameters)
    assert model.head_weight_VE.shape == (config.vocabulary_size, config.width)


def test_weights_made_later_on_a_real_device_are_those_made_at_once() -> None:
    at_once = build(shape(), seed=3)
    with torch.device("meta"):
        later = build(shape())
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    for name, value in at_once.state_dict().items():
        assert torch.equal(later.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_seed_starts_from_the_same_weights_in_every_dtype(dtype: torch.dtype) -> None:
    wide = build(shape(), seed=3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        other = build(shape(), seed=3)
    finally:
        torch.set_default_dtype(before)
    for name, value in wide.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.to(dtype)), name


def test_initial_spread() -> None:
    model = build(shape(width=256, heads=8, kv_heads=8, head_width=32, hidden_width=512, layers=8))
    layer = model.layers[5]
    for weight in (
        model.head_weight_VE,
        model.embed_tokens.weight,
        layer.self_attn.k_proj.weight,
        layer.mlp.up_proj.weight,
    ):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.005, rel=0.02)  # 0.02 / sqrt(2 * 8)
    assert (layer.input_layernorm.weight == 1).all()


def test_padding_changes_nothing() -> None:
    tokens = random_tokens(1, 12)
    document = torch.tensor([[0] + [1] * 4 + [2] * 7])
    padded = torch.cat([document, torch.full((1, 3), -1)], dim=1)
    for kernel in ("reference", "sdpa"):
        model = build(shape(), "anchor", kernel=kernel)
        got = logits(model, F.pad(tokens, (0, 3), value=5), padded)
        torch.testing.assert_close(got[:, :12], logits(model, tokens, document), rtol=0, atol=1e-6)
        assert got.isfinite().all()


def test_impossible_shapes_are_all_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        shape(heads=6, kv_heads=4, head_width=7)
    assert "heads=6 is no multiple of kv_heads=4" in str(error.value)
    assert "head_width=7 must be even" in str(error.value)
    with pytest.raises(ValueError) as error:
        shape(layers=0, kv_heads=0, rope_theta=-1.0)
    assert [line.split(" ")[0] for line in str(error.value).splitlines()] == [
        "layers=0",
        "kv_heads=0",
        "rope_theta=-1.0",
    ]
