"""The `object:` section of the settings: a store that hosts share.

object:
  url: s3://kv-cache/production
  share: worth
  daily_exports: 200GiB
"""

from typing import Self

from pydantic import Field, model_validator

from ...sources.objects.problems import StoreError
from ...sources.objects.store import check_address
from .fields import Bytes, Section, Share, refuse


class ObjectSettings(Section):
    """Object store in which hosts keep blocks for each other. Needs `pip install kvtier[objects]`."""

    url: str = ""
    """Address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX or file:///FOLDER (also
    NFS). Set it where hosts serve the same prompts, or are replaced. Credentials, region and endpoint are the
    environment's (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL ...) or the machine's. Empty: no store."""
    share: Share = "worth"
    """What this host stores there: `worth`, what was used again after it was put; `eager`, all that is put.
    Set `eager` for prompts that are computed here and used elsewhere, `off` to only fetch."""
    daily_exports_bytes: Bytes | None = Field(default=None, alias="daily_exports")
    """Bytes a day after which this host stores nothing more there. Set it where the store costs by the byte,
    or is small: it keeps what is not used for three days. Empty: no limit."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.url.startswith("memory:"):
            refuse("url", "memory: is not shared with any host; write file:///FOLDER")
        try:
            if self.url:
                check_address(self.url)
        except StoreError as problem:
            refuse("url", str(problem))
        return self
