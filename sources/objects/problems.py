"""What went wrong with an object store, from what obstore raises: which does not always say what happened.

Measured with obstore 0.12 and Ceph 16.2 (docs/decisions/0022-object-store.md):

    said                          happened                       believed here
    FileNotFoundError, any call   the bucket is missing          MISSING_BUCKET, by the code in the answer
    FileNotFoundError of a HEAD   no object, or no bucket        no object: the answer has no body
    AlreadyExistsError, 412       it is there                    it is there, also after our own lost answer
    AlreadyExistsError, 409       another PUT is under way       asked again: nothing may be there
    GenericError                  403 or 404 of a list, 503,     by status and code
                                  429, no connection, timeout
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_METADATA_SERVICE = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_RANGES = ("nvalid range", "Requested range was invalid", "Wanted range starting at")
MAX_TEXT: Final = 300


class StoreProblem(Enum):
    """Why an operation failed, with what an administrator can do about it."""

    MISSING_BUCKET = "the bucket or folder does not exist; create it, or correct the address"
    DENIED = "the store refuses these credentials; correct them, or give them the right"
    NO_CREDENTIALS = "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the like"
    NO_ACCOUNT = "an address az:// names a container; set AZURE_STORAGE_ACCOUNT_NAME to the account"
    NOT_TRUSTED = "its certificate is of no authority that is trusted; name the right one in SSL_CERT_FILE"
    BUSY = "the store asks for fewer requests; it is retried later"
    UNREACHABLE = "no answer; check the address, the network and the store"
    SHORT = "the object or the answer is shorter or longer than announced"
    NO_ADDRESS = "no address of a store"
    NOT_INSTALLED = "what this store needs is not installed"
    UNSUPPORTED = "the store does not support this operation"
    WRONG_KEY = "tenants' keys in this store were wrapped with another master key"
    FOREIGN_NAME = "a name that no client can list; delete this object with the store's own tool"
    WRONG_CLOCK = "bundles go by the date, and no host would look where this one stores them"
    FULL = "the store takes no more bytes; enlarge it, or shorten the epoch"
    FAILED = "the store failed"


#: What says nothing about the store as a whole.
OF_ONE_OBJECT: Final = frozenset({StoreProblem.SHORT, StoreProblem.FOREIGN_NAME})
#: What says of an export that nothing can be stored; what is stored may still be read.
OF_EXPORTS: Final = frozenset(
    {StoreProblem.FULL, StoreProblem.DENIED, StoreProblem.UNSUPPORTED, StoreProblem.WRONG_CLOCK}
)


class StoreError(Exception):
    """An operation of an object store failed; `problem` says why. Never names credentials."""

    def __init__(self, problem: StoreProblem, detail: str = "") -> None:
        super().__init__(f"{problem.value} ({detail})" if detail else problem.value)
        self.problem = problem


_BY_CODE = {
    "NoSuchBucket": StoreProblem.MISSING_BUCKET,
    "ContainerNotFound": StoreProblem.MISSING_BUCKET,
    "SlowDown": StoreProblem.BUSY,
    "ConditionalRequestConflict": StoreProblem.BUSY,
    "OperationAborted": StoreProblem.BUSY,
    "RequestTimeTooSkewed": StoreProblem.DENIED,
    "NotImplemented": StoreProblem.UNSUPPORTED,
    "QuotaExceeded": StoreProblem.FULL,
    "InvalidRange": StoreProblem.SHORT,
}
_BY_STATUS = {
    "401": StoreProblem.DENIED,
    "403": StoreProblem.DENIED,
    "404": StoreProblem.MISSING_BUCKET,  # of a list: there is no object to be missing
    "409": StoreProblem.BUSY,
    "416": StoreProblem.SHORT,
    "429": StoreProblem.BUSY,
    "501": StoreProblem.UNSUPPORTED,
    "503": StoreProblem.BUSY,
    "507": StoreProblem.FULL,
}


def status_of(error: Exception) -> str:
    """Return the HTTP status in the text of an error, `412`; empty when there is none."""
    match = _STATUS.search(str(error))
    return match[1] if match else ""


def code_of(error: Exception) -> str:
    """Return the S3 error code in the text of an error, `NoSuchBucket`; empty when there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def problem_of(error: Exception) -> StoreProblem:
    """Return what an exception of obstore means."""
    text, kind = str(error), type(error).__name__
    if any(host in text for host in _METADATA_SERVICE):
        return StoreProblem.NO_CREDENTIALS
    if "External AWS credential provider" in text:  # it says itself what is wrong, to a log or a start
        return StoreProblem.NO_CREDENTIALS
    if "Account must be specified" in text:
        return StoreProblem.NO_ACCOUNT
    if (code := code_of(error)) in _BY_CODE:
        return _BY_CODE[code]
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreProblem.DENIED
    if kind in ("NotSupportedError", "NotImplementedError"):
        return StoreProblem.UNSUPPORTED
    if "object with invalid path" in text:  # of a whole listing, which ends there
        return StoreProblem.FOREIGN_NAME
    if any(words in text for words in _RANGES):
        return StoreProblem.SHORT
    if "No space left" in text or "os error 28" in text or "quota exceeded" in text.lower():
        return StoreProblem.FULL
    if (status := status_of(error)) in _BY_STATUS:
        return _BY_STATUS[status]
    if isinstance(error, FileNotFoundError) or "canonicalize filesystem root" in text:
        return StoreProblem.MISSING_BUCKET
    if "InvalidCertificate" in text:
        return StoreProblem.NOT_TRUSTED
    if "error sending request" in text or "HTTP error" in text or "timed out" in text:
        return StoreProblem.UNREACHABLE
    return StoreProblem.FAILED


def explain(error: Exception) -> StoreError:
    """Return (not raise) the StoreError for an exception of obstore."""
    first_line = " ".join(str(error).partition("\n\n")[0].split())
    text = first_line.partition("<?xml")[0].rstrip(": ")
    text = "".join(one if one.isprintable() else "\ufffd" for one in text)  # names may be planted
    code = code_of(error)
    return StoreError(problem_of(error), f"{text}: {code}"[:MAX_TEXT] if code else text[:MAX_TEXT])


@contextmanager
def explained() -> Iterator[None]:
    """Turn exceptions of obstore inside into StoreErrors.
    FileNotFoundError, for an object that is not there, passes unless it was the bucket."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if _BY_CODE.get(code_of(error)) is StoreProblem.MISSING_BUCKET:
            raise explain(error) from error
        raise
    except (BaseError, OSError) as error:
        raise explain(error) from error
