"""The `object:` section of the settings: a store that hosts share.

object:
  url: s3://kv-cache/production
  share: worth
  daily_exports: 200GiB
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ...sources.objects.problems import StoreError
from ...sources.objects.store import check_address
from ..core.worth import SourcePrices
from .fields import Bytes, Section, Share, refuse

Digits = Annotated[str, Field(pattern=r"^[0-9a-f]{8,128}$")]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ObjectPrice(Section):
    """Prices in dollars, for the day's bill and for `share: worth`. Set them where the store is rented."""

    gb_month: Dollars = 0.0
    """Of 10^9 bytes stored for 30 days, as the store's price list has it. Set it where storage is rented."""
    thousand_puts: Dollars = 0.0
    """Of a thousand PUT, COPY and LIST requests. Set it where requests are charged."""
    thousand_gets: Dollars = 0.0
    """Of a thousand GET and HEAD requests. Set it where requests are charged."""
    gb_egress: Dollars = 0.0
    """Of 10^9 bytes read from the store. Set it where hosts and store are in different regions."""
    gpu_hour: Dollars = 0.0
    """Of an hour of the GPU that computes a namespace's prefill. With `share: worth` a bundle is then stored
    after as many uses as save what storing it costs. Set it with the prices above. 0: a second use is
    enough."""

    def for_planner(self) -> SourcePrices:
        """Return the prices as the planner counts with them."""
        return SourcePrices(**self.model_dump())


class ObjectSettings(Section):
    """Object store in which hosts keep blocks for each other.
    Needs `pip install kvtier[objects]`, or `kvtier[mooncake]` for a pool of Mooncake Store."""

    url: str = ""
    """Address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER (also
    NFS) or mooncake://MASTER:PORT (memory that Mooncake Store pools). Set it where hosts serve the same
    prompts, or are replaced. Credentials, region and endpoint are the environment's (AWS_ACCESS_KEY_ID,
    AWS_ENDPOINT_URL ...) or the machine's. Needs kvtier[objects], mooncake:// kvtier[mooncake]. Empty: no
    store."""
    share: Share = "worth"
    """What this host stores there: `worth`, what was used again after it was put; `eager`, all that is put.
    Set `eager` for prompts that are computed here and used elsewhere, `off` to only fetch."""
    namespaces: dict[Digits, Share] = {}
    """Exceptions from `share`, by the first 8 or more hex digits of a namespace's digest (`objects ls` and
    `status --json` of kvtier) or its model's. Of several that match, and of a tenant's, the least counts.
    Set `off` for a model that is computed sooner than fetched (`kvtier doctor` says so) and `eager` for one
    that is computed here and used elsewhere."""
    daily_exports_bytes: Bytes | None = Field(default=None, alias="daily_exports")
    """Bytes a day after which this host stores nothing more there. Set it where the store costs by the byte,
    or is small: it keeps what is not used for three days. Empty: no limit."""
    price: ObjectPrice = ObjectPrice()
    """Prices of the store and of prefill, in dollars; 0: not counted."""

    @property
    def is_pool(self) -> bool:
        """Whether the store is a pool of Mooncake, which lists nothing and protects nothing."""
        return self.url.startswith("mooncake:")

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
