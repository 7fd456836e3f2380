import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.tokenizers import load_tokenizer


@pytest.fixture
def saved(tmp_path):
    """A small BPE tokenizer as Hugging Face libraries save it, with a truncation left switched on."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["[UNK]", "<start>", "<stop>", "[BOS]"])
    backend.train_from_iterator(["the cat sat on the mat", "the dog sat on the log"], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", backend.token_to_id("<start>"))]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<start>", "eos_token": "<stop>"}))
    return tmp_path


@settings(deadline=None)
@given(st.text())
def test_bytes_are_utf8_and_come_back(text):
    tokenizer = load_tokenizer("byte")
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_no_text_makes_special_bytes():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.anchor_id, tokenizer.end_id, tokenizer.vocabulary_size) == (256, 257, 258)
    assert tokenizer.encode_batch(["<bos><eos>"])[0].max() < 256
    assert tokenizer.decode([256, 104, 105, 257]) == "<bos>hi<eos>"


def test_options_change_the_digest():
    digests = [load_tokenizer("byte", *options).digest for options in [(), (None, ""), ("<eos>",), (None, "<bos>")]]
    assert len(set(digests)) == 4
    assert load_tokenizer("byte").digest == load_tokenizer("byte", "<bos>", "<eos>").digest


def test_a_saved_tokenizer_by_file_and_by_folder(saved):
    by_file, by_folder = load_tokenizer(str(saved / "tokenizer.json")), load_tokenizer(str(saved))
    assert by_file.digest == by_folder.digest
    backend = by_file.backend
    assert by_file.anchor_id == backend.token_to_id("<start>")
    assert by_file.end_id == backend.token_to_id("<stop>")
    assert by_file.vocabulary_size == backend.get_vocab_size()


def test_whole_texts_without_special_tokens_padding_or_truncation(saved):
    tokenizer = load_tokenizer(str(saved))
    texts = ["the cat sat on the mat", "log", ""]
    encoded = tokenizer.encode_batch(texts)
    pieces = [[tokenizer.backend.id_to_token(i) for i in ids] for ids in encoded]
    assert ["".join(piece) for piece in pieces] == [text.replace(" ", "") for text in texts]
    assert len(pieces[0]) >= 6 and encoded[2].size == 0
    assert all(ids.dtype == np.uint32 for ids in encoded)


def test_special_tokens_as_asked_for(saved):
    tokenizer = load_tokenizer(str(saved), "[BOS]", "")
    assert tokenizer.anchor_id == tokenizer.backend.token_to_id("[BOS]")
    assert tokenizer.end_id is None and tokenizer.pad_id == tokenizer.anchor_id


def test_common_names_where_nothing_stands_beside(saved):
    (saved / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r'data\.end_of_document.*or "" for none; it has .*<stop>'):
        load_tokenizer(str(saved))
    assert load_tokenizer(str(saved), None, "<stop>").anchor_id == 3  # [BOS]


def test_the_map_of_special_tokens_may_hold_objects(saved):
    (saved / "tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    (saved / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<start>"}, "eos_token": {"content": "<stop>"}})
    )
    assert load_tokenizer(str(saved)).anchor_id == 1


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (("nowhere.json",), "data.tokenizer"),
        (("byte", "<s>"), "data.anchor_token"),
        (("byte", None, "x"), "data.end_of"),
    ],
)
def test_what_a_user_may_get_wrong(arguments, setting):
    with pytest.raises(ValueError, match=setting):
        load_tokenizer(*arguments)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"not json", b'{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* is no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_broken_file_beside_the_tokenizer(saved):
    (saved / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no JSON object"):
        load_tokenizer(str(saved))
