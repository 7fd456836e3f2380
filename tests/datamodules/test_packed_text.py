import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import tokenizers
import torch

from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.packed_text import PackedTextDataModule
from datamodules.tokenizers import load_tokenizer
from modules.metrics import target_offset

CONFIG = DataConfig(context_length=48, anchor="row_start", positions="continuous", validation_fraction=0.3)


@pytest.fixture
def data_of(store_of, tokenizer, many_texts):
    store = store_of(many_texts)

    def make(config=CONFIG, rows_per_batch=4, total_rows=80, **options):
        return PackedTextDataModule(
            config,
            corpus=store,
            tokenizer=tokenizer,
            rows_per_batch=rows_per_batch,
            total_rows=total_rows,
            seed=0,
            **options,
        )

    return make


def texts_and_targets(batches, tokenizer):
    """Counts of document texts, and of (text, offset of the target in it) with BOS and first tokens left aside."""
    texts, targets = Counter(), Counter()
    for batch in batches:
        for tokens, labels, documents in zip(batch.tokens_BT, batch.labels_BT, batch.document_BT, strict=True):
            for number in range(1, int(documents.max()) + 1):
                inside = (documents == number) & (tokens != tokenizer.anchor_id)
                text = tokenizer.decode(tokens[inside])
                texts[text] += 1
                begin = int(inside.nonzero()[0])
                for place in (inside & (labels != -100)).nonzero().flatten().tolist():
                    offset = place + 1 - begin
                    assert labels[place] == tokens[inside][offset]
                    targets[text, offset] += 1
    return texts, targets


def test_validation_scores_the_same_targets_whatever_the_anchors_and_the_batch(data_of, tokenizer, many_texts):
    found = [
        texts_and_targets(data_of(replace(CONFIG, anchor=anchor, **others), size).val_dataloader(), tokenizer)
        for anchor in ("row_start", "every_document", "none")
        for size in (1, 3, 64)
        for others in (
            {"packing": "concatenate"},
            {"packing": "best_fit", "labels": "across", "long_documents": "drop"},
        )
    ]
    assert all(one == found[0] for one in found)
    texts, targets = found[0]
    documents = data_of().validation.documents
    assert texts == Counter(many_texts[i] + "<eos>" for i in documents)
    expected = Counter((many_texts[i] + "<eos>", k) for i in documents for k in range(1, len(many_texts[i]) + 1))
    assert targets == expected


@pytest.fixture
def words(tmp_path):
    """A tokenizer of words, as GPT-2's: one token is both BOS and EOS."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate("abcdefgh")}})
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("labels", ["within_document", "across"])
def test_one_token_for_beginning_and_end_misplaces_no_border(words, tmp_path, labels):
    """Documents that hold that token too, where a row cuts them or elsewhere, are neither cut nor counted otherwise."""
    assert words.anchor_id == words.end_id == 0
    file = tmp_path / "corpus.jsonl"
    texts = ["a b c <|endoftext|> d e", "<|endoftext|> f g", "h <|endoftext|> <|endoftext|>", "a b c d e f g"] * 5
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Corpus.open_or_build(tmp_path / "home", DataConfig(corpus=str(file)), words)
    assert [corpus.document(i).tolist() for i in range(3)] == [[1, 2, 3, 0, 4, 5, 0], [0, 6, 7, 0], [8, 0, 0, 0]]

    found = []
    for anchor in ("row_start", "every_document"):
        config = replace(CONFIG, anchor=anchor, context_length=4, packing="best_fit", labels=labels, tail="pad",
                         validation_fraction=0.5)  # fmt: skip
        data = PackedTextDataModule(
            config, corpus=corpus, tokenizer=words, rows_per_batch=2, total_rows=2, seed=0, anchor_copies_at_zero=True
        )
        tokens, targets = Counter(), Counter()
        for batch in data.val_dataloader():
            offset_BT = target_offset(batch.document_BT, batch.anchor_copy_BT)
            scored = (batch.labels_BT != -100) & (offset_BT >= 1)
            targets.update(zip(batch.labels_BT[scored].tolist(), offset_BT[scored].tolist(), strict=True))
            text = batch.document_BT > 0
            if batch.anchor_copy_BT is not None:
                text &= ~batch.anchor_copy_BT
                assert (batch.position_BT[batch.anchor_copy_BT] == 0).all()
            tokens.update(batch.tokens_BT[text].tolist())
        assert tokens == Counter(np.concatenate([corpus.document(i) for i in data.validation.documents]).tolist())
        found.append(targets)
    assert found[0] == found[1]
    # Pieces of 3 tokens: all but the first of each is a target.
    lengths = corpus.lengths[data.validation.documents].tolist()
    assert sum(found[0].values()) == sum(n - -(-n // 3) for n in lengths)


def test_tags_and_interleaved_chunks_are_for_training_alone(data_of, tokenizer, many_texts):
    plain = data_of(replace(CONFIG, tail="pad"))
    data = data_of(replace(CONFIG, tail="pad", domain_tags=True, interleave=True))
    for one, other in zip(data.val_dataloader(), plain.val_dataloader(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))
    (tag,) = {name + "\n" for name in data.training_rows.corpus.table.sources}
    texts = Counter()
    everything = data.training_rows[range(len(data.training_rows))]
    for tokens, documents in zip(everything.tokens_BT, everything.document_BT, strict=True):
        for number in range(1, int(documents.max()) + 1):
            texts.update([tokenizer.decode(tokens[documents == number])])
    whole = Counter(tag + many_texts[i] + "<eos>" for i in data.training.documents)
    assert sum((texts & whole).values()) > len(data.training.documents) / 2, "those that no row's end cuts"
    assert sorted("".join(texts.elements())) == sorted("".join(whole.elements()))
    assert data.training.piece_tag.sum() == len(tag) * len(data.training.documents)
    assert len(data.training.plan.piece_document) > 1.5 * len(data.training.documents)


def test_training_sees_every_token_of_its_documents(data_of, tokenizer, many_texts):
    data = data_of(replace(CONFIG, tail="pad", context_length=20))
    data = data_of(replace(CONFIG, tail="pad", context_length=20), 1, len(data.training_rows))
    letters = Counter()
    for batch in data.train_dataloader():
        letters.update(batch.tokens_BT[batch.document_BT > 0].tolist())
    expected = Counter()
    for i in data.training.documents:
        expected.update([*many_texts[i].encode(), tokenizer.end_id])
    assert letters == expected


def test_total_rows_are_one_pass(data_of):
    loader = data_of(total_rows=400).train_dataloader()
    assert len(loader) == 100 > len(data_of().training_rows) / 4
    assert sum(batch.tokens_BT.shape[0] for batch in loader) == 400
    with pytest.raises(AssertionError, match="last micro batch"):
        data_of(total_rows=401).train_dataloader()


def test_ranks_come_from_the_trainer(data_of):
    loaders = []
    for rank in range(2):
        data = data_of()
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2, ckpt_path=None)
        loaders.append((data.train_dataloader(), data.val_dataloader()))
    assert [len(loader) for loader in loaders[0]] == [len(loader) for loader in loaders[1]]
    one = next(iter(data_of(rows_per_batch=8).train_dataloader())).tokens_BT
    assert torch.equal(one[::2], next(iter(loaders[0][0])).tokens_BT)
    assert torch.equal(one[1::2], next(iter(loaders[1][0])).tokens_BT)


def test_settings_reach_the_rows(data_of):
    config = replace(CONFIG, anchor="every_document", labels="across")
    batch = next(iter(data_of(config, anchor_copies_at_zero=True).train_dataloader()))
    copies = batch.tokens_BT == 256
    assert (batch.position_BT[copies] == 0).all() and copies.sum() > 4
    assert (batch.labels_BT == 256).any()
    reset = next(iter(data_of(replace(CONFIG, positions="reset")).train_dataloader()))
    assert reset.position_BT.max() < 47


def test_both_reports(data_of, many_texts):
    data = data_of()
    parts = {"training": data.training, "validation": data.validation}
    report = {
        f"{name}/{key}": value for name, part in parts.items() for key, value in part.plan.report.as_dict().items()
    }
    assert report["training/documents_in"] + report["validation/documents_in"] == len(many_texts)
    assert report["training/tokens_in"] + report["validation/tokens_in"] == sum(len(text) + 1 for text in many_texts)
    assert report["validation/rows"] == len(data.validation_rows)
    assert all(type(value) in (int, float) for value in report.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_length": 100_000}, r"data\.tail='drop'"),
        ({"context_length": 2, "long_documents": "drop"}, r"data\.long_documents='drop'"),
        ({"validation_fraction": 0.001, "validation_tokens": 2}, r"data\.validation_tokens=2"),
    ],
)
def test_nothing_left(data_of, change, message):
    with pytest.raises(ValueError, match=message):
        data_of(replace(CONFIG, **change))


class Counting(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.training, self.validated = [], 0

    def training_step(self, batch, batch_idx):
        self.training.append(batch.tokens_BT.shape[0])
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated += batch.tokens_BT.shape[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("error:.*does not have many workers.*")
def test_lightning_trains_and_validates_on_all_rows(data_of, tmp_path):
    data, model = data_of(total_rows=80), Counting()
    pl.Trainer(
        max_steps=10,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    ).fit(model, datamodule=data)
    assert model.training == [4] * 20
    assert model.validated == len(data.validation_rows)
