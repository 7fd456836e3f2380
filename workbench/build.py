"""The one file that knows both model and data: from a config to what a run is made of.

`check` answers everything that can be known before documents are read, and reports every mistake at once; `module` and
`data` then build without asking the user anything more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from datamodules.config import DataConfig
from datamodules.corpus import Corpus, Progress
from datamodules.document_table import DocumentTable
from datamodules.packing import PackPlan
from datamodules.sources.file_digests import FileDigests
from datamodules.splits import PackedPart, plan_parts
from datamodules.tokenizers import Tokenizer, load_tokenizer
from modules.attention.capabilities import resolve_kernel
from modules.attention.strategies import Strategy, check_data_choice, visible_pairs
from modules.compilation import why_no_compilation
from modules.hf_tensors import checkpoint_digest
from modules.hf_weights import check_weights, load_weights, read_shape
from modules.llama import Llama, LlamaConfig
from modules.optim import check_master_weights
from modules.precision import BFLOAT16_PRODUCTS, DTYPES, Bfloat16Products, check_precision, resolve_bfloat16_products
from workbench.config import RunConfig
from workbench.errors import UserError, user_input
from workbench.pretrained import checkpoint_directory

if TYPE_CHECKING:
    from datamodules.packed_text import PackedTextDataModule
    from modules.language_model import LanguageModel

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config with every `auto` decided for this machine."""

    config: RunConfig
    data: DataConfig
    """With tokenizer, anchor and positions decided."""
    strategy: Strategy
    tokenizer: Tokenizer
    shape: LlamaConfig
    device_type: str
    kernel: str
    bfloat16_products: Bfloat16Products
    checkpoint: Path | None
    """Folder of `model.checkpoint`."""
    checkpoint_digest: str | None
    """Identity of what that folder holds."""

    def to_params(self) -> dict[str, Any]:
        """What `auto` became, for the run's params."""
        return {
            "resolved.kernel": self.kernel,
            **self._kernel_details(),
            **({"resolved.checkpoint_digest": self.checkpoint_digest} if self.checkpoint_digest else {}),
            "resolved.device": self.device_type,
            "resolved.bfloat16_products": self._products_in_words(),
            "resolved.master_weights": "float32" if self._has_master_weights() else "none",
            "resolved.anchor": self.data.anchor,
            "resolved.positions": self.data.positions,
            "resolved.tokenizer": self.data.tokenizer,
            "resolved.tokenizer_digest": self.tokenizer.digest,
            "resolved.vocabulary_size": self.shape.vocabulary_size,
            "resolved.rope_theta": self.shape.rope_theta,
            "resolved.rope_type": self.shape.rope_scaling.rope_type,
            "resolved.original_max_position_embeddings": self.shape.rope_scaling.original_max_position_embeddings,
        }

    @property
    def compilation_leaves_products(self) -> bool:
        """Whether bfloat16 products are torch's own on this CPU because the model is compiled."""
        trainer = self.config.trainer
        return trainer.compile and trainer.precision in BFLOAT16_PRODUCTS and self.device_type == "cpu"

    def _products_in_words(self) -> str:
        return "native (trainer.compile)" if self.compilation_leaves_products else self.bfloat16_products

    def _has_master_weights(self) -> bool:
        return check_master_weights(self.config.optimizer, self.config.trainer.precision)

    def _kernel_details(self) -> dict[str, Any]:
        """What the names of kernel and strategy leave open."""
        details: dict[str, Any] = {}
        if self.strategy.window is not None:
            details |= {"resolved.window": self.strategy.window, "resolved.sink": self.strategy.sink}
        if self.kernel == "flash":
            from modules.attention import flash

            details["resolved.kernel_package"] = flash.in_use(head_width=self.shape.head_width)
        return details


def check(config: RunConfig) -> Resolved:
    """Decides every `auto` and holds settings of different sections to one another.

    Raises:
        UserError: every mistake, one line each.
    """
    problems: list[str] = []

    def attempt(step: Callable[[], T]) -> T | None:
        try:
            return step()
        except (ValueError, UserError) as error:
            problems.extend(str(error).splitlines())
            return None

    strategy = config.attention.resolve()
    device_type = attempt(lambda: _device_type(config))
    named = config.model.checkpoint
    checkpoint = attempt(lambda: checkpoint_directory(named)) if named is not None else None
    base = attempt(lambda: read_shape(checkpoint)) if checkpoint is not None else None
    data = attempt(lambda: _decide_data(config.data, strategy))
    tokenizer_spec = attempt(lambda: _tokenizer_spec(config, checkpoint))
    tokenizer = attempt(lambda: _tokenizer(config.data, tokenizer_spec)) if tokenizer_spec else None
    shape = None
    if named is None or base is not None:
        shape = attempt(lambda: _shape(config, tokenizer.vocabulary_size if tokenizer else 2, base))
    if checkpoint is not None and base is not None:
        attempt(lambda: check_weights(checkpoint, base))
    attempt(lambda: _schedule(config))
    attempt(lambda: _shift_deviation(config, shape))
    attempt(lambda: check_master_weights(config.optimizer, config.trainer.precision))
    products = kernel = None
    if device_type is not None:
        products = attempt(
            lambda: resolve_bfloat16_products(
                config.trainer.precision,
                device_type=device_type,
                bfloat16_products=config.trainer.bfloat16_products,
                is_compiled=config.trainer.compile,
            )
        )
        attempt(lambda: check_precision(config.trainer.precision, device_type=device_type))
        attempt(lambda: _compilation(config, device_type))
        kernel = attempt(lambda: _kernel(config, strategy, device_type, shape))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    assert device_type and data and tokenizer and tokenizer_spec and shape and products and kernel
    return Resolved(
        config=config,
        data=replace(data, tokenizer=tokenizer_spec),
        strategy=strategy,
        tokenizer=tokenizer,
        shape=shape,
        device_type=device_type,
        kernel=kernel,
        bfloat16_products=products,
        checkpoint=checkpoint,
        checkpoint_digest=checkpoint_digest(checkpoint) if checkpoint else None,
    )


def _device_type(config: RunConfig) -> str:
    asked, devices = config.trainer.accelerator, config.trainer.devices
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(
            "trainer.accelerator='cuda', but torch finds no CUDA device here. Set trainer.accelerator=auto."
        )
    device_type = "cuda" if has_cuda and asked != "cpu" else "cpu"
    if device_type == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(f"trainer.devices={devices}, but this machine has {torch.cuda.device_count()} CUDA devices.")
    return device_type


def _shift_deviation(config: RunConfig, shape: LlamaConfig | None) -> None:
    layers = shape.layers if shape else 2**31
    if misfits := config.evaluation.shift_deviation.misfits("evaluation.shift_deviation", layers=layers):
        raise ValueError("\n".join(misfits))


def _compilation(config: RunConfig, device_type: str) -> None:
    if config.trainer.compile and (reason := why_no_compilation(device_type)) is not None:
        raise ValueError(f"trainer.compile=true cannot be had here. {reason} Or set trainer.compile=false.")


def _decide_data(data: DataConfig, strategy: Strategy) -> DataConfig:
    anchor, positions = check_data_choice(strategy, data.anchor, data.positions)
    return replace(data, anchor=anchor, positions=positions)


def _schedule(config: RunConfig) -> None:
    warmup, steps = config.optimizer.warmup_steps, config.trainer.max_steps
    if warmup > steps:
        raise ValueError(
            f"optimizer.warmup_steps={warmup} is more than trainer.max_steps={steps}, so the learning rate would never "
            "get there. Lower the one or raise the other."
        )


def _tokenizer_spec(config: RunConfig, checkpoint: Path | None) -> str | None:
    """`byte`, or an absolute path. None: it would be the checkpoint's, and that is not there."""
    spec = config.data.tokenizer
    if spec == "byte" or (spec == "auto" and config.model.checkpoint is None):
        return "byte"
    if spec != "auto":
        return str(Path(spec).expanduser().absolute())
    if checkpoint is None:
        return None
    if not (checkpoint / "tokenizer.json").is_file():
        raise ValueError(
            f"data.tokenizer=auto: model.checkpoint={config.model.checkpoint!r} has no tokenizer.json. Set "
            "data.tokenizer to the one it was trained with."
        )
    return str(checkpoint)


def _tokenizer(data: DataConfig, spec: str) -> Tokenizer:
    return load_tokenizer(spec, data.anchor_token, data.end_of_document)


def _shape(config: RunConfig, vocabulary_size: int, base: LlamaConfig | None) -> LlamaConfig:
    shape = config.model.resolve(vocabulary_size, config.rotary.theta, config.rotary.scaling, checkpoint=base)
    length = config.data.context_length
    if config.model.max_positions is None and "max_positions" not in config.model.overrides:
        return replace(shape, max_positions=max(shape.max_positions, length))
    if shape.max_positions < length:
        raise ValueError(
            f"data.context_length={length} is longer than model.max_positions={shape.max_positions}. "
            "Raise model.max_positions or leave it null."
        )
    return shape


def _kernel(config: RunConfig, strategy: Strategy, device_type: str, shape: LlamaConfig | None) -> str:
    dtype = DTYPES[config.trainer.precision]
    if config.rotary.precision == "float32_scores" and dtype != torch.float64:
        dtype = torch.float32
    return resolve_kernel(
        config.attention.kernel,
        strategy=strategy,
        device_type=device_type,
        dtype=dtype,
        head_width=shape.head_width if shape else 64,
        tokens=config.data.context_length,
    )


def model(resolved: Resolved) -> Llama:
    """The Llama with the config's initial weights, in float32 (Lightning's precision plugin casts it)."""
    torch.manual_seed(resolved.config.seed)

    def build() -> Llama:
        return Llama(resolved.shape, strategy=resolved.strategy, kernel=resolved.kernel, rotary=resolved.config.rotary)

    if resolved.checkpoint is None:
        return build()
    with torch.device("meta"):  # so that the weights are in memory once
        llama = build()
    with user_input("model.checkpoint"):
        load_weights(llama, resolved.checkpoint)
    return llama


def module(resolved: Resolved) -> "LanguageModel":
    """The LightningModule."""
    from modules.language_model import LanguageModel

    llama = model(resolved)
    if resolved.config.trainer.compile:
        llama.compile()  # in place, so that names of parameters and checkpoints stay; translated when first called
    return LanguageModel(
        llama,
        optimizer=resolved.config.optimizer,
        max_steps=resolved.config.trainer.max_steps,
    )


def corpus(
    resolved: Resolved,
    home: Path,
    *others: Resolved,
    digests: FileDigests | None = None,
    report: Callable[[str, Progress], object] = lambda source, progress: None,
) -> Corpus:
    """All documents as tokens, tokenised now if this is the first time.

    Args:
        resolved: whose corpus and tokenizer.
        home: where token stores live.
        others: more configs over the same documents and tokenizer; rows must be possible for all.
        digests: what is known of files already.
        report: told now and then how far which source is.
    Raises:
        UserError: the corpus cannot be read (with file and line or byte), or makes no rows. Nothing is left behind.
    """

    def accept(table: DocumentTable) -> None:
        for each in (resolved, *others):
            plan_parts(table, each.data, each.tokenizer)

    with user_input():
        return Corpus.open_or_build(
            home, resolved.data, resolved.tokenizer, accept=accept, report=report, digests=digests
        )


def data(resolved: Resolved, documents: Corpus) -> "PackedTextDataModule":
    """The LightningDataModule over all rows that the training consumes.

    Raises:
        UserError: no full row or no validation document can be made of the corpus.
    """
    from datamodules.packed_text import PackedTextDataModule

    trainer = resolved.config.trainer
    with user_input():
        return PackedTextDataModule(
            resolved.data,
            corpus=documents,
            tokenizer=resolved.tokenizer,
            rows_per_batch=trainer.rows_per_batch,
            total_rows=trainer.max_steps * trainer.accumulate * trainer.rows_per_batch * trainer.devices,
            seed=resolved.config.seed,
            anchor_copies_at_zero=resolved.strategy.anchor,
        )


@dataclass(frozen=True)
class PairCounts:
    """(query, key) pairs that attention computes in all rows of a plan."""

    visible: int
    causal: int
    """What full causal attention over the same rows would compute."""
    rows: int

    @property
    def share(self) -> float:
        """Visible over causal."""
        return self.visible / self.causal


def rows(resolved: Resolved, documents: Corpus) -> tuple[PackedPart, PackedPart]:
    """(training, validation) documents and their rows, from lengths alone.

    Raises:
        UserError: no full row or no validation document can be made of the corpus.
    """
    with user_input():
        return plan_parts(documents.table, resolved.data, resolved.tokenizer)


def pair_counts(resolved: Resolved, plan: PackPlan) -> PairCounts:
    """Counts a plan's pairs from document lengths; reads no token."""
    length = resolved.data.context_length
    anchors = 1 if plan.anchor == "row_start" else 0
    row, width = plan.row_documents
    per_row = visible_pairs(resolved.strategy, width, row, anchors, plan.rows)
    return PairCounts(visible=int(per_row.sum()), causal=plan.rows * length * (length + 1) // 2, rows=plan.rows)


def data_report(
    resolved: Resolved, documents: Corpus, training: PackedPart, validation: PackedPart
) -> dict[str, int | float]:
    """Where every document and token went, for the run's packing.json and the dataset's profile."""
    return {
        **{f"store/{key}": value for key, value in documents.report().items()},
        **{f"mix/{key}": value for key, value in training.mix.items()},
        **{f"training/{key}": value for key, value in training.plan.report.as_dict().items()},
        "training/tag_tokens": int(training.piece_tag.sum()),
        "training/visible_pair_share": pair_counts(resolved, training.plan).share,
        **{f"validation/{key}": value for key, value in validation.plan.report.as_dict().items()},
    }
