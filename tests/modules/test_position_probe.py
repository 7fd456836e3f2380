"""The probe against whole attention matrices of transformers' Llama, at positions that differ by more than rounding."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from modules import shift_deviation
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.hf_weights import load_weights, read_shape
from modules.llama import Llama
from modules.number_formats import NumberFormat
from modules.position_probe import Rotation, propagate, share
from modules.positional_consistency import compare_logits
from modules.rotary import RotaryConfig
from modules.shift_deviation import DeviationSums, ShiftDeviation
from tests.oracles.shift_deviation import deviations

TOKENS = 40
LENGTHS = (8, 24, TOKENS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model and ours with the same weights, in float64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)  # attention that is far from even
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    ours = Llama(read_shape(folder), strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    load_weights(ours, folder)
    return theirs.double(), ours.double().eval()


def tokens_T(length=TOKENS):
    return torch.randint(53, (TOKENS,), generator=torch.Generator().manual_seed(1))[:length]


def position_ST(length=TOKENS):
    """No shifts but other distances, so that attention differs by far more than any rounding."""
    place = torch.arange(length)
    return torch.stack([place, 2 * place + 3, 7 * place])


@torch.no_grad()
def their_attention(model, tokens, position):
    """([L, H, T, T] attention, the same of scores before the softmax)."""
    turned = []

    def keep(module, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        shape = (1, len(tokens), -1, module.head_dim)
        q, k = (project(hidden).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj))
        turned.append(apply_rotary_pos_emb(q, k, cos, sin))

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    attentions = model(tokens[None], position_ids=position[None], output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    scores = [(q @ k.repeat_interleave(2, dim=1).mT)[0] / q.shape[-1] ** 0.5 for q, k in turned]
    return np.stack([a[0].numpy() for a in attentions]), np.stack([s.numpy() for s in scores])


def run(model, rotation=None, positions=None, tokens=None, lengths=LENGTHS, **options):
    positions = position_ST() if positions is None else positions
    sums = DeviationSums(shifts=len(positions) - 1, lengths=lengths)
    tokens = tokens_T() if tokens is None else tokens
    propagate(model, tokens, positions, rotation or Rotation(), sums=sums, **options)
    return sums.result()


@pytest.mark.parametrize("length", LENGTHS)
def test_propagated_equals_the_formulas_over_transformers_attention(pair, length):
    theirs, ours = pair
    each = [their_attention(theirs, tokens_T(length), position) for position in position_ST(length)]
    expected = deviations(*zip(*each, strict=True))
    found, n = run(ours), LENGTHS.index(length)
    for s, wanted in enumerate(expected):
        assert wanted["deviation"] > 1
        for name in ("deviation", "row_deviation", "first_token_share", "logit_deviation"):
            assert float(getattr(found, f"{name}_SN")[s, n]) == pytest.approx(wanted[name], rel=1e-4), name
    if length == TOKENS:
        for s, wanted in enumerate(expected):
            np.testing.assert_allclose(found.token_ST[s].numpy(), wanted["token_T"], rtol=1e-3, atol=1e-6)


def test_shared_turns_one_passs_queries_and_keys(pair):
    """Oracle: projections of transformers' forward pass at the reference positions, turned by complex numbers."""
    theirs, ours = pair
    projected = []

    def keep(module, args, kwargs):
        shape = (1, TOKENS, -1, module.head_dim)
        hidden = kwargs["hidden_states"]
        projected.append([p(hidden).view(shape).transpose(1, 2)[0] for p in (module.q_proj, module.k_proj)])

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in theirs.model.layers]
    with torch.no_grad():
        theirs(tokens_T()[None], position_ids=position_ST()[:1])
    for hook in hooks:
        hook.remove()

    def turned(x_HTD, position_T):
        half = x_HTD.shape[-1] // 2
        angle = position_T[:, None].double() * 10_000.0 ** (-torch.arange(half).double() / half)
        z = torch.complex(x_HTD[..., :half], x_HTD[..., half:]) * torch.exp(1j * angle)
        return torch.cat([z.real, z.imag], dim=-1)

    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    score_S, attention_S = [], []
    with torch.no_grad():
        for position in position_ST():
            scores = [
                turned(q, position) @ turned(k, position).repeat_interleave(2, dim=0).mT / q.shape[-1] ** 0.5
                for q, k in projected
            ]
            score_S.append(np.stack([s.numpy() for s in scores]))
            attention_S.append(np.stack([s.masked_fill(hidden, -torch.inf).softmax(-1).numpy() for s in scores]))
    expected = deviations(attention_S, score_S)
    sums = DeviationSums(shifts=2, lengths=LENGTHS)
    share(ours, tokens_T(), position_ST(), {Rotation(dtype=torch.float64): sums})
    for s, wanted in enumerate(expected):
        for name in ("deviation", "row_deviation", "first_token_share", "logit_deviation"):
            assert float(getattr(sums.result(), f"{name}_SN")[s, -1]) == pytest.approx(wanted[name], rel=1e-4), name


def test_shares_one_pass_among_rotations(pair):
    """Several rotations at once give what each gives alone."""
    _, ours = pair
    ours = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    rotations = [Rotation(precision=name, dtype=torch.bfloat16) for name in ("float32_scores", "float32", "compute")]
    together = {rotation: DeviationSums(shifts=2, lengths=LENGTHS) for rotation in rotations}
    share(ours, tokens_T(), position_ST(), together)
    for rotation, sums in together.items():
        alone = DeviationSums(shifts=2, lengths=LENGTHS)
        share(ours, tokens_T(), position_ST(), {rotation: alone})
        assert torch.equal(alone.result().head_SNLH, sums.result().head_SNLH)


def test_equal_positions_deviate_by_nothing(pair):
    _, ours = pair
    found = run(ours, positions=torch.arange(TOKENS).expand(2, -1) + 5)
    assert not found.head_SNLH.any() and not found.logit_SNLH.any()
    assert found.first_token_share_SN.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shift", [1, 500, 100_000])
def test_the_yardstick_sees_no_break(pair, shift):
    """In float64 RoPE is relative: what is left at shift s is s times the last bit of an angle."""
    _, ours = pair
    place = torch.arange(TOKENS)
    found = run(ours, positions=torch.stack([place + 16, place + shift]))
    assert float(found.row_deviation_SN[0, -1]) < 1e-10


def test_policies_break_in_the_order_of_their_roundings(pair):
    """On one model: scores in float32 hardly, rounded q and k more, rounded tables more still."""
    _, ours = pair
    ours = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    place = torch.arange(TOKENS)
    positions = torch.stack([place + 16, place + 2000])
    rows = []
    for name in ("float32_scores", "float32", "compute", "low_positions"):
        sums = DeviationSums(shifts=1, lengths=LENGTHS)
        share(ours, tokens_T(), positions, {Rotation(precision=name, dtype=torch.bfloat16): sums})
        rows.append(float(sums.result().row_deviation_SN[0, -1]))
    assert rows[0] < rows[1] / 20 and rows[1] < rows[2] < rows[3] / 3, rows


def test_blocks_of_rows_change_nothing(pair, monkeypatch):
    _, ours = pair
    whole = run(ours)
    monkeypatch.setattr(shift_deviation, "SCORES_AT_ONCE", 100)
    pieces = run(ours)
    for name in ("head_SNLH", "row_SNLH", "first_SNLH", "logit_SNLH", "token_ST"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=1e-10, atol=1e-12)


def test_a_prefix_is_a_shorter_sequence(pair):
    _, ours = pair
    short = run(ours, positions=position_ST(24), tokens=tokens_T(24), lengths=(8, 24))
    long = run(ours)
    torch.testing.assert_close(short.head_SNLH, long.head_SNLH[:, :2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(short.logit_SNLH, long.logit_SNLH[:, :2], rtol=1e-9, atol=1e-12)


def test_twice_the_same_bits(pair):
    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig()).bfloat16()
    rotation = Rotation(precision="compute", dtype=torch.bfloat16)
    first, second = run(model, rotation), run(model, rotation)
    assert torch.equal(first.head_SNLH, second.head_SNLH) and torch.equal(first.token_ST, second.token_ST)


@pytest.mark.parametrize("strategy", ["full", "intra_document"])
def test_hidden_states_are_the_models_own(pair, strategy):
    """`propagate` computes attention itself; the model's forward pass by a kernel must come to the same."""
    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES[strategy], kernel="reference", rotary=RotaryConfig()).double()
    model.load_state_dict(ours.state_dict())
    document_T = torch.arange(TOKENS) // 10 + 1
    borders = Borders.of(document_T[None])
    documents = {"document_T": document_T} if strategy == "intra_document" else {}
    hidden_STE = propagate(model, tokens_T(), position_ST(), Rotation(), **documents)
    for hidden_TE, position_T in zip(hidden_STE, position_ST(), strict=True):
        expected = model(tokens_T()[None], position_T[None], borders)[0]
        torch.testing.assert_close(hidden_TE, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["float32_scores", "float32", "compute", "low_positions"])
def test_each_policy_is_the_models_own(pair, precision):
    """Turned q and k of a bfloat16 model, bit for bit as its forward pass would hand them to attention."""
    from modules.rotary import apply_rotary

    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig(precision=precision))
    position = torch.arange(TOKENS)[None] + 3000
    q = torch.randn(1, 4, TOKENS, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    tables = model.rotary_tables(position, torch.bfloat16)
    expected = apply_rotary(q, q[:, :2], tables, precision)
    rotation = Rotation(precision=precision)
    found = rotation.turn(q, q[:, :2], rotation.tables(model, position, torch.bfloat16))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_layers_can_be_chosen(pair):
    _, ours = pair
    calls = []
    found = run(ours, layers=[1], on_layer=lambda: calls.append(1))
    assert len(calls) == 2  # nothing after the last one chosen
    torch.testing.assert_close(found.head_SNLH[:, :, 0], run(ours).head_SNLH[:, :, 1])


def test_emulated_formats_meet_the_real_ones(pair):
    """What bfloat16 does to turned q and k is what the policy `float32` does to them; float32 rounds nothing."""
    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    position = torch.arange(TOKENS)[None]
    q = torch.randn(1, 4, TOKENS, 8, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    wide = Rotation(precision="float32_scores", dtype=torch.float32)

    def turned(rotation):
        return rotation.turn(q, q[:, :2], rotation.tables(model, position, torch.float32))[0]

    emulated = Rotation(precision="float32_scores", dtype=torch.float32, rotated_format=NumberFormat.of("bfloat16"))
    real = Rotation(precision="float32", dtype=torch.bfloat16)
    assert torch.equal(turned(emulated), turned(real).float())
    as_float32 = NumberFormat.of("float32")
    nothing = Rotation(
        precision="float32_scores", dtype=torch.float32, tables_format=as_float32, rotated_format=as_float32
    )
    assert torch.equal(turned(nothing), turned(wide))
    tables = Rotation(precision="float32_scores", dtype=torch.float32, tables_format=NumberFormat.of("bfloat16"))
    cos, _ = tables.tables(model, position, torch.float32)
    expected, _ = model.rotary_tables(position, torch.float32)
    assert torch.equal(cos, expected.bfloat16().float())


def test_more_mantissa_bits_break_less(pair):
    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    place = torch.arange(TOKENS)
    positions = torch.stack([place + 16, place + 2000])
    rows = []
    for bits in (4, 8, 12, 16):
        form = NumberFormat(8, bits)
        rotation = Rotation(precision="float32_scores", dtype=torch.float32, tables_format=form, rotated_format=form)
        sums = DeviationSums(shifts=1, lengths=LENGTHS)
        share(model, tokens_T(), positions, {rotation: sums})
        rows.append(float(sums.result().row_deviation_SN[0, -1]))
    assert all(8 < few / more < 32 for few, more in pairwise(rows)), rows  # 16 for four bits


def test_length_dependent_frequencies_are_one_set_for_all_shifts(pair):
    """Otherwise the change of frequencies, and not the rounding, would be measured."""
    from modules.rotary_scaling import ScalingConfig

    _, ours = pair
    scaling = ScalingConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=32)
    model = Llama(
        ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig(scaling=scaling)
    ).double()
    place = torch.arange(TOKENS)
    found = run(model, positions=torch.stack([place + 16, place + 5000]))
    assert float(found.row_deviation_SN[0, -1]) < 1e-9


def test_means_over_sequences(pair):
    _, ours = pair
    first, second = run(ours), run(ours, tokens=tokens_T().flip(0))
    mean = ShiftDeviation.mean([first, second])
    torch.testing.assert_close(mean.deviation_SN, (first.deviation_SN + second.deviation_SN) / 2)
    assert not torch.allclose(first.deviation_SN, second.deviation_SN)


def test_logits_are_compared_by_torchs_own_divergence(pair):
    _, ours = pair
    hidden_STE = propagate(ours, tokens_T(), position_ST(), Rotation())
    found = compare_logits(ours, hidden_STE)
    logits = ours.logits(hidden_STE).log_softmax(-1)
    for s, consistency in enumerate(found, start=1):
        kl = torch.nn.functional.kl_div(logits[s], logits[0], log_target=True, reduction="batchmean")
        assert consistency.mean_kl == pytest.approx(kl.item(), rel=1e-9) and consistency.mean_kl > 0
        largest = (ours.logits(hidden_STE[s]) - ours.logits(hidden_STE[0])).abs().max()
        assert consistency.max_logit_difference == pytest.approx(largest.item(), rel=1e-12)
    assert compare_logits(ours, hidden_STE[:1].expand(2, -1, -1))[0].mean_kl == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_what_the_cpu_does(pair):
    _, ours = pair
    model = Llama(ours.config, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig()).double()
    model.load_state_dict(ours.state_dict())
    document_T, expected = torch.arange(TOKENS) // 20, run(model)
    consistency = compare_logits(model, propagate(model, tokens_T(), position_ST(), Rotation(), document_T=document_T))
    model.cuda()
    found = run(model, positions=position_ST().cuda(), tokens=tokens_T().cuda())
    torch.testing.assert_close(found.head_SNLH, expected.head_SNLH, rtol=1e-9, atol=1e-12)
    hidden_STE = propagate(model, tokens_T().cuda(), position_ST().cuda(), Rotation(), document_T=document_T.cuda())
    on_gpu = compare_logits(model, hidden_STE)
    assert [one.mean_kl for one in on_gpu] == pytest.approx([one.mean_kl for one in consistency], rel=1e-7)
