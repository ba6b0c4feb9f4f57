"""HttpAccess: what is served over HTTP, and to which readers.

    /healthz, /readyz     every caller: one word, for supervisors and routers
    everything else       `observe.readers`: every caller, or those with one of the tokens named there

With tenants there is no reader until one is named: sums over all of them tell each what the others do. An
administrator's token is not taken: it could do more than look, and HTTP carries it in the clear. So a reader
has a token that is good for nothing else. It comes as `Authorization: Bearer TOKEN`, as Prometheus sends it,
or as the password of HTTP's basic scheme, for which a browser asks by itself. Cookies and a page to sign in
were rejected: nothing that this listener answers changes its state.
"""

import base64
import binascii

from ..config import Observe
from ..security.principals import Authenticator

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
CHALLENGE = 'Basic realm="kvtier: any name, and a token of observe.readers", charset="UTF-8"'
NAME_READERS = "with tenants, metrics and page are for tokens that `observe.readers` names; it names none"


class HttpAccess:
    """Decides, by the tenants and tokens there are at the time."""

    def __init__(self, settings: Observe, access: Authenticator) -> None:
        self._settings = settings
        self._access = access

    def adopt(self, settings: Observe) -> None:
        """Replace the settings."""
        self._settings = settings

    @property
    def is_anyone(self) -> bool:
        """Whether every caller is a reader."""
        return self._settings.is_for_anyone(self._access.has_tenants)

    @property
    def has_no_reader(self) -> bool:
        """Whether only readiness is served."""
        return not self.is_anyone and not self._settings.reader_tokens

    def refusal(self, path: str, authorization: str) -> str:
        """Return why a request is refused, empty when it is not. Takes as long for any wrong token."""
        if path in OPEN_PATHS or self.is_anyone:
            return ""
        names = self._settings.reader_tokens
        if not names:
            return NAME_READERS
        token = token_in(authorization)
        if not token:
            return "send a token that `observe.readers` names, as a bearer token or as a password"
        return (
            ""
            if self._access.token_name(token) in names
            else "this token is none of those that `observe.readers` names"
        )


def token_in(authorization: str) -> str:
    """Return the token in an Authorization header, empty when there is none to be read."""
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
