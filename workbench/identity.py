"""When two trials are the same work: the hash that decides whether a finished cell is skipped."""

import hashlib
import json
from dataclasses import dataclass

from workbench.config import RunConfig, to_dict
from workbench.environment import code_version, device_name

FREE_OF_IDENTITY = (
    ("name",),
    ("tracking",),
    ("data", "corpus"),
    ("data", "sources"),
    ("data", "tokenizer"),
    ("data", "workers"),
    ("data", "processes"),
    ("model", "checkpoint"),
)
"""Settings that two equal trials may differ in. Sources, tokenizer and checkpoint count by content, through digests."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """When two trials are the same work."""

    config: str
    """Hash of the config as written (`auto` stays `auto`), the data's and checkpoint's content and the device."""
    code: str
    """Hash of our .py files."""
    data_digest: str

    @property
    def trial(self) -> str:
        """Config and code together: a finished trial with this hash is done."""
        return hashlib.sha256(f"{self.config} {self.code}".encode()).hexdigest()[:16]


def identity(
    config: RunConfig, *, data_digest: str, device_type: str, checkpoint_digest: str | None = None
) -> Identity:
    """The identity of a config on this machine. `checkpoint_digest` is of what `model.checkpoint` names."""
    kept = to_dict(config)
    for *path, last in FREE_OF_IDENTITY:
        section = kept
        for part in path:
            section = section[part]
        del section[last]
    content = [data_digest] if checkpoint_digest is None else [data_digest, checkpoint_digest]
    written = json.dumps([kept, *content, device_type, device_name(device_type)], sort_keys=True)
    return Identity(
        config=hashlib.sha256(written.encode()).hexdigest()[:16], code=code_version(), data_digest=data_digest
    )
