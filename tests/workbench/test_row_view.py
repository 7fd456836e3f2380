import json

import pytest

from workbench.cli import main

EXPERIMENT = """
model: {preset: debug}
attention: {strategy: anchor}
data: {corpus: CORPUS, tokenizer: byte, context_length: 8, end_of_document: "", validation_fraction: 0.99}
trainer: {max_steps: 1, rows_per_batch: 1, precision: 32-true}
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))

    def make(*texts, **settings):
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        file = tmp_path / "run.yaml"
        file.write_text(EXPERIMENT.replace("CORPUS", str(corpus)))
        return [str(file), *(f"data.{key}={value}" for key, value in settings.items())]

    return make


def test_a_row_of_two_documents_under_a_shared_anchor(experiment, capsys):
    """Two of the three documents train; whichever they are, the row reads A a a a b b b b or the like."""
    arguments = experiment("aaa", "bbbb", "zz", validation_tokens=2)
    assert main(["show", *arguments, "--rows", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["rows"]
    first, second = (piece["text"] for piece in row["pieces"] if piece["document"] > 0)
    assert {first, second} == {"aaa", "bbbb"}
    assert row["tokens"] == [256, *first.encode(), *second.encode()]
    assert row["document"] == [0, *[1] * len(first), *[2] * len(second)]
    assert row["position"] == list(range(8))
    within = [[*text.encode()[1:], -100] for text in (first, second)]
    assert row["labels"] == [-100, *within[0], *within[1]]
    assert [piece["place"] for piece in row["pieces"]] == [0, 1, 1 + len(first)]
    assert shown["report"]["training/tokens_out"] == 7


def test_tags_and_chunks_are_shown_as_they_stand(experiment, capsys):
    arguments = experiment("abcdefgh", "ABCDEFGH", "zz", validation_tokens=2, packing="best_fit", context_length=40,
                           domain_tags="true", interleave="true")  # fmt: skip
    assert main(["show", *arguments, "--rows", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["rows"]
    pieces = [piece for piece in row["pieces"] if piece["document"] > 0]
    assert len(pieces) > 2
    texts = {1: "", 2: ""}
    for piece in pieces:
        assert piece["tag"] == (7 if piece["start"] == 0 else 0)
        assert piece["start"] == max(len(texts[piece["document"]]) - 7, 0)
        texts[piece["document"]] += piece["text"]
    assert sorted(texts.values()) == ["corpus\nABCDEFGH", "corpus\nabcdefgh"]
    assert shown["report"]["training/tag_tokens"] == 14
    assert main(["show", *arguments, "--rows", "1"]) == 0
    printed = capsys.readouterr().out
    assert "corpus #" in printed and "7 of its domain tag, tokens 0 to " in printed


def test_what_a_person_sees(experiment, capsys):
    arguments = experiment(
        "ab[bold]c\n", "0123456789" * 4, "zz", validation_tokens=2, packing="best_fit", context_length=32
    )
    assert main(["show", *arguments, "--rows", "9"]) == 0
    shown = capsys.readouterr().out
    assert "'<bos>' (anchor)" in shown and "anchor of the row" in shown
    assert "'ab[bold]c\\n'" in shown and ", whole" in shown
    assert "tokens 0 to 30 of 40\n" in shown
    assert "... 21 more" in shown
    assert "padding, " in shown and "These are all rows: there are 2." in shown
    assert "padding_share" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_no_rows_asked_for(experiment, capsys, tmp_path):
    assert main(["show", *experiment("aaa", "bbbb"), "--rows", "0"]) == 2
    assert "--rows 0 shows nothing" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
