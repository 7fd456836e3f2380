"""Where documents come from: the settings of one source."""

import re
from dataclasses import dataclass

HUB = "hub:"
"""Begins the name of a dataset on the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Documents of one origin. Whoever holds it asks for `broken_source_rules`, and knows the section it stands in."""

    corpus: str = "python_stdlib"
    """`python_stdlib` (this Python's own source files, one a document); a file or folder of .jsonl (also .gz, .zst) or
    .parquet; a folder of text files, one a document; a folder of `datasets.save_to_disk`; or `hub:ORG/NAME`."""
    text_field: str = "text"
    """Field that holds a document's text. Records without it that hold `input_ids` are tokens already."""
    source_field: str | None = None
    """Field that names a document's source or domain, `a.b` for b inside a; null: all are of one source."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    revision: str | None = None
    """Commit, branch or tag of a hub dataset; null is the newest."""
    streaming: bool = False
    """Whether a hub dataset is read from the net as it is tokenised, and not downloaded first."""
    max_documents: int | None = None
    """Read only so many documents, the first ones."""

    def broken_source_rules(self) -> list[str]:
        """What is wrong, each line beginning with the setting's name inside its section."""
        broken = []
        if not self.corpus:
            broken.append(
                "corpus is empty. Set python_stdlib, or the path of a .jsonl or .parquet file or of a folder."
            )
        if not self.text_field:
            broken.append("text_field is empty. Set the field that holds the text.")
        if self.source_field == "":
            broken.append("source_field is empty. Set the field that names the source, or null for none.")
        if not self.split:
            broken.append("split is empty. Set the split to read, such as train.")
        if self.max_documents is not None and self.max_documents < 1:
            broken.append(f"max_documents={self.max_documents} leaves nothing. Set 1 or more, or null for all.")
        if not self.corpus.startswith(HUB):
            only_hub = {"subset": self.subset, "revision": self.revision, "streaming": self.streaming or None}
            broken += [
                f"{name}={value!r} is for datasets of the hub, but corpus={self.corpus!r} is none. Remove it, or set "
                f"corpus={HUB}ORG/NAME."
                for name, value in only_hub.items()
                if value is not None
            ]
        elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.corpus.removeprefix(HUB)):
            broken.append(f"corpus={self.corpus!r} is no name of a hub dataset. Write {HUB}ORG/NAME.")
        return broken
