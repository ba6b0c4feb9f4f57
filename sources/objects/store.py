"""An object store: the few operations that bundles need, carried out by obstore.

S3 and what speaks it, GCS, Azure, a folder (`file://`, also NFS) and memory behind one class. Calls block and
release the GIL; the store is thread-safe, and several threads are several requests in flight. Requests,
retries and waits are bounded by `StoreLimits`: a cache that waits longer than computing takes is none.

Names of objects are derived from their content, so an object is created once and never overwritten.
obstore is imported when a store is opened: it takes a tenth of a second, and few processes need it.
"""

import asyncio
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from ...tiers.base import Buffer
from ...tiers.payload import copy
from .credentials import credentials_file
from .problems import StoreError, StoreProblem, explain, explained, status_of
from .usage import StoreRequest, StoreUsage

CHUNK_BYTES: Final = 1 << 20  # copied at once on the way into memory
_PLAIN = "http://"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SCHEMES = ("s3", "gs", "az", "file", "mooncake", "memory")
_FORMS = (
    "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER"
    " or mooncake://MASTER:PORT"
)
_POOL = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(/[\w-]+)*/?", re.ASCII)


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    num_bytes: int
    modified_at_s: float  # seconds since 1970, by the store's clock


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one operation. The longest one takes about `request_s + retry_s`."""

    connect_s: float = 1.0
    idle_s: float = 2.0  # without a byte while an answer is read
    request_s: float = 30.0  # one request with its body
    num_retries: int = 2
    retry_s: float = 5.0  # after which no retry begins


class ObjectStore:
    """Objects under one address. Thread-safe. Methods raise StoreError, which names the fix.

    `endpoint`: of an S3-compatible store; otherwise the environment says (AWS_ENDPOINT_URL), as it says
    credentials and region. Nothing is asked of the store before the first call; `check_bucket` does.
    """

    has_listing = True  # whether `objects`, `folders` and `copy` are supported
    evicts = False  # whether it makes room by itself, so that there are no epochs

    def __init__(self, address: str, *, endpoint: str = "", limits: StoreLimits | None = None) -> None:
        self.address = address
        self.usage = StoreUsage()
        self._limits = limits or StoreLimits()
        self._store = self._open(endpoint)
        self._lock = threading.Lock()
        self._creating: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._is_abandoned = False

    def _open(self, endpoint: str) -> Any:
        return _open(self.address, endpoint, self._limits)

    def _explained(self) -> AbstractContextManager[None]:
        return explained()

    def __repr__(self) -> str:
        return f"ObjectStore({self.address!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an object store holds credentials, and does not leave its process")

    @contextmanager
    def _request(self, operation: str) -> Iterator[StoreRequest]:
        """Count one request, and turn exceptions of obstore inside into StoreErrors; see `explained`."""
        request, began_at = StoreRequest(operation), time.monotonic()
        try:
            with self._explained():
                yield request
        except FileNotFoundError:
            request.outcome = "missing"
            raise
        except StoreError as error:
            request.outcome = error.problem.name.lower()
            raise
        finally:
            self.usage.add(request, time.monotonic() - began_at)

    @property
    def has_expiry(self) -> bool:
        """Whether `expiry` can be asked."""
        return urlsplit(self.address).scheme == "s3"

    def lifecycle_place(self) -> tuple[str, str]:
        """Return the scheme, and the prefix by which a lifecycle rule of this store names its keys."""
        parts = urlsplit(self.address)
        path = parts.path.strip("/")
        if parts.scheme == "az":  # its rules are of an account, so they name the container first
            path = f"{parts.netloc}/{path}".rstrip("/")
        return parts.scheme, path

    def check_bucket(self) -> None:
        """Raise StoreError unless the bucket, or the folder, is there and can be listed.
        To be called at a start: a get of an object cannot tell a missing bucket from a cold cache."""
        try:
            next(self.objects("v1/"), None)
        except StoreError as error:
            if error.problem is not StoreProblem.FOREIGN_NAME:  # which the bucket answered with
                raise

    def create(self, key: str, payload: Buffer) -> bool:
        """Store an object; return False, and leave it as it is, when there is one of that name.
        `payload` is borrowed, and must not change before this returns. `abandon` ends it."""
        from obstore.exceptions import AlreadyExistsError

        if self.address.startswith("file:") and not os.path.isdir(urlsplit(self.address).path):
            raise StoreError(StoreProblem.MISSING_BUCKET, self.address)  # obstore would make it
        for _ in range(2):
            try:
                with self._request("put") as request:
                    try:
                        asyncio.run(self._put(key, payload))
                    except asyncio.CancelledError:
                        raise StoreError(StoreProblem.FAILED, f"{key}: given up") from None
                    except AlreadyExistsError as error:
                        is_in_doubt = status_of(error) == "409"  # another one is under way, or was
                        request.outcome = "exists"
                    else:
                        request.sent_bytes = len(payload)
                        return True
            except FileNotFoundError as error:
                raise explain(error) from error
            if not is_in_doubt or self.size(key) is not None:
                return False
        raise StoreError(StoreProblem.BUSY, f"{key}: another create of it is under way")

    async def _put(self, key: str, payload: Buffer) -> None:
        """Store an object in a loop of its own, because a blocking put cannot be ended."""
        from obstore import put_async

        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._is_abandoned:
                raise asyncio.CancelledError
            self._creating[task] = asyncio.get_running_loop()
        try:
            await put_async(self._store, key, payload, mode="create", use_multipart=False)
        finally:
            with self._lock:
                del self._creating[task]

    def abandon(self) -> None:
        """End every `create` and `objects` that is under way with a StoreError, and those that come."""
        with self._lock:
            self._is_abandoned = True
            for task, loop in self._creating.items():
                loop.call_soon_threadsafe(task.cancel)

    def read(self, key: str, parts: Sequence[tuple[int, Buffer]]) -> bool:
        """Fill each buffer of `parts` with bytes of an object from an offset on; False when there is none.

        Parts are read in their order, one request each. Bytes are copied once, from the client's memory into
        the buffers, which are undefined after False or an error.
        """
        try:
            for start, into in parts:
                with self._request("get") as request:
                    filled = 0
                    for chunk in self._chunks(key, start, start + len(into)):
                        if filled + len(chunk) > len(into):
                            raise StoreError(StoreProblem.SHORT, f"{key}: more than {len(into)} bytes came")
                        copy(into[filled : filled + len(chunk)], chunk)
                        filled += len(chunk)
                        request.received_bytes = filled
                if filled != len(into):
                    raise StoreError(StoreProblem.SHORT, f"{key}: {filled} of {len(into)} bytes came")
        except FileNotFoundError:
            return False
        return True

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield bytes `start` to `end` of an object in chunks, as they arrive; one request.
        Yields fewer when the object ends before that, and none when there is no object."""
        try:
            with self._request("get") as request:
                for chunk in self._chunks(key, start, end):
                    request.received_bytes += len(chunk)
                    yield chunk
        except FileNotFoundError:
            return
        except StoreError as error:
            if error.problem is not StoreProblem.SHORT:
                raise

    def _chunks(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield what an object has from `start` to `end`. Raises what obstore raises."""
        from obstore import get, get_range

        if urlsplit(self.address).scheme != "file":
            result = get(self._store, key, options={"range": (start, end)})
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)
            return
        # A stream of a file comes in pieces of 8 KiB, each by a thread: a tenth of the speed.
        for first in range(start, end, CHUNK_BYTES):
            part = memoryview(get_range(self._store, key, start=first, end=min(first + CHUNK_BYTES, end)))
            yield part
            if len(part) < CHUNK_BYTES:
                return

    def size(self, key: str) -> int | None:
        """Return the length of an object in bytes; None when there is none."""
        found = self._head(key)
        return None if found is None else int(found["size"])

    def modified_at_s(self, key: str) -> float | None:
        """Return when an object was stored, in seconds since 1970 by the store's clock; 0: it does not say.
        None when there is none."""
        found = self._head(key)
        return None if found is None else float(found["last_modified"].timestamp())

    def _head(self, key: str) -> Mapping[str, Any] | None:
        from obstore import head

        try:
            with self._request("head"):
                found: Mapping[str, Any] = head(self._store, key)
                return found
        except FileNotFoundError:
            return None

    def first_there(self, keys: Sequence[str]) -> int | None:
        """Return the index of the first of these objects that is there, all asked at once; None: none is."""
        if len(keys) < 2:  # no loop for one request
            return 0 if keys and self.size(keys[0]) is not None else None
        for index, found in enumerate(asyncio.run(self._are_there(keys))):
            if isinstance(found, BaseException):
                raise found
            if found:
                return index
        return None

    async def _are_there(self, keys: Sequence[str]) -> "list[bool | BaseException]":
        return await asyncio.gather(*map(self._is_there, keys), return_exceptions=True)

    async def _is_there(self, key: str) -> bool:
        from obstore import head_async

        try:
            with self._request("head"):
                await head_async(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`, a folder that ends in `/`.
        In the order of keys on S3, in any order from a folder."""
        from obstore import list as list_objects

        try:
            with self._request("list"):
                for chunk in list_objects(self._store, prefix):
                    if self._is_abandoned:
                        raise StoreError(StoreProblem.FAILED, f"{prefix}: given up")
                    for found in chunk:
                        yield ObjectInfo(found["path"], found["size"], found["last_modified"].timestamp())
        except FileNotFoundError as error:
            raise explain(error) from error

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders in `prefix`, a folder that ends in `/`, sorted."""
        from obstore import list_with_delimiter

        try:
            with self._request("list"):
                found = list_with_delimiter(self._store, prefix)["common_prefixes"]
        except FileNotFoundError as error:
            raise explain(error) from error
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def copy(self, source: str, target: str) -> bool:
        """Copy an object inside the store, no byte of it through this process; False when there is none.
        One that is at `target` is replaced: callers copy to the same content-derived name only."""
        from obstore import copy as copy_object

        try:
            with self._request("copy"):
                copy_object(self._store, source, target)
        except FileNotFoundError:
            return False
        return True

    def expiry(self, key: str) -> str:
        """Return what S3 says of the rule that covers an object, x-amz-expiration; empty: none does.
        By an address that obstore signs, because it does not show this header itself."""
        from obstore import sign

        with explained():
            signed = sign(self._store, "HEAD", key, timedelta(seconds=60))
        request = urllib.request.Request(signed, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=self._limits.request_s) as answer:
                return str(answer.headers.get("x-amz-expiration", ""))
        except OSError as error:  # its text could hold the signed address
            raise StoreError(StoreProblem.UNREACHABLE, f"HEAD of {key}: {type(error).__name__}") from None

    def delete(self, keys: Iterable[str]) -> int:
        """Delete objects, and return how many keys there were; those that are not there do not matter.
        Takes them as they are needed, so a listing may be as long as it is."""
        from obstore import delete

        rest, num_keys = iter(keys), 0
        while some := list(islice(rest, 1000)):
            num_keys += len(some)
            try:
                with self._request("delete"):
                    delete(self._store, some)
            except FileNotFoundError:  # a folder stops at the first that is missing
                for key in some:
                    self._delete_one(key)
        return num_keys

    def _delete_one(self, key: str) -> None:
        from obstore import delete

        try:
            with self._request("delete"):
                delete(self._store, key)
        except FileNotFoundError:
            return


def check_address(address: str) -> None:
    """Raise StoreError unless `address` is one of a store, without credentials."""
    parts = urlsplit(address)
    if parts.scheme not in _SCHEMES or (parts.scheme not in ("file", "memory") and not parts.netloc):
        raise StoreError(StoreProblem.NO_ADDRESS, _FORMS)
    if parts.scheme == "mooncake" and not _POOL.fullmatch(f"{parts.netloc}{parts.path}"):
        fix = "write mooncake://MASTER:PORT, and after it /PREFIX of letters, digits, - and _, if any"
        raise StoreError(StoreProblem.NO_ADDRESS, fix)
    if parts.username or parts.password or parts.query:
        raise StoreError(StoreProblem.NO_ADDRESS, "one holds no credentials and no options; " + _FORMS)


def travels_plain(address: str) -> bool:
    """Return whether what is sent to this store travels without TLS, as far as the environment says."""
    return urlsplit(address).scheme == "s3" and _endpoint_of(os.environ).startswith(_PLAIN)


def _endpoint_of(environment: Mapping[str, str]) -> str:
    """Return the S3 endpoint that the environment names; empty for Amazon's own."""
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), "")


def _open(address: str, endpoint: str, limits: StoreLimits) -> Any:
    """Return obstore's store for an address. Raises StoreError."""
    check_address(address)
    parts = urlsplit(address)
    try:
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise StoreError(
            StoreProblem.UNSUPPORTED, "the package obstore is missing; `pip install kvtier[objects]`"
        ) from error
    try:
        with explained():
            if parts.scheme == "file":
                return LocalStore(parts.path, automatic_cleanup=True)
            if parts.scheme == "memory":
                return from_url(address)
            return from_url(address, **_remote_options(parts.scheme, endpoint, limits, os.environ))
    except FileNotFoundError as error:
        raise explain(error) from error


def _remote_options(
    scheme: str, endpoint: str, limits: StoreLimits, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keyword arguments of `from_url` for a store behind a network."""
    named = endpoint or _endpoint_of(environment)
    client = {
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "read_timeout": timedelta(seconds=limits.idle_s),
        "timeout": timedelta(seconds=limits.request_s),
        "pool_max_idle_per_host": "64",
        "allow_http": scheme == "s3" and named.startswith(_PLAIN),
    }
    retries = {
        "max_retries": limits.num_retries,
        "retry_timeout": timedelta(seconds=limits.retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=200),
            "base": 2,
        },
    }
    options: dict[str, Any] = {"client_options": client, "retry_config": retries}
    if scheme == "s3":
        # Every fragment is compared with a checksum of its own; hashing all of it once more for a signature
        # takes a quarter of the time of an export.
        options["unsigned_payload"] = environment.get("AWS_UNSIGNED_PAYLOAD", "true")
        if (file := credentials_file(environment)) is not None:
            options["credential_provider"] = file
        if named:
            options["endpoint"] = named
    return options
