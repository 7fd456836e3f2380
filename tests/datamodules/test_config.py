import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from datamodules.config import DataConfig


def test_omegaconf_fills_it_and_gives_it_back():
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), {"context_length": 512, "packing": "best_fit"})
    assert OmegaConf.to_object(merged) == DataConfig(context_length=512, packing="best_fit")


def test_every_broken_rule_is_named_at_once():
    with pytest.raises(ValueError) as caught:
        DataConfig(context_length=1, validation_fraction=1.0, workers=-1, packing="bestfit", shuffle_seed=-3)
    message = str(caught.value)
    for part in (
        "data.context_length=1",
        "data.validation_fraction=1.0",
        "data.workers=-1",
        "data.packing='bestfit'",
        "data.shuffle_seed=-3",
    ):
        assert part in message
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize(
    "broken",
    [
        {"corpus": ""},
        {"text_field": ""},
        {"tokenizer": ""},
        {"validation_tokens": 1},
        {"tail": None},
        {"interleave": True, "packing": "one_per_row"},
    ],
)
def test_each_rule(broken):
    with pytest.raises(ValueError, match=f"data.{next(iter(broken))}"):
        replace(DataConfig(), **broken)


def test_a_dry_run_can_plan_without_torch():
    code = (
        "import sys, datamodules.config, datamodules.tokenizers, datamodules.sources.find, datamodules.corpus, "
        "datamodules.packing, datamodules.splits; assert not {'torch', 'tokenizers', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
