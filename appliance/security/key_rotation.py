"""KeyRotation: another master key is taken while the daemon runs, from the file that the policy names.

    file watched, SIGHUP, policy applied -> read -> does it open everything? -> wrap anew -> use

The file is read again when it changes, as certificates and tokens are, and with every reload. A file that
cannot be used changes nothing: the keys read before still hold. A reload is refused for it as a whole,
because the next start would be, and the administrator that reloads can mend it; a change that the watch
noticed is reported in the log, in the status and to Prometheus.

Keys are used in the cold store's own thread: a tenant's key may be made or destroyed at the same time. The
file is read elsewhere (host/detached.py): one that hangs must not hold up the store.
"""

import logging

from ...tiers.base import CopyError
from ...tiers.cold.engine import ColdStore
from ...tiers.encryption.keyring import MasterKeyUse
from ...tiers.encryption.master_keys import KeyringError, MasterKeys, load_master_keys
from ..appliance import Appliance
from ..config import EncryptionSettings
from ..errors import ApplianceError, error

log = logging.getLogger(__name__)


class KeyRotation:
    """Applies changes of the master key file. Owned by the event loop.

    `settings` must name a file, and `store` have been opened with its keys.
    """

    def __init__(self, appliance: Appliance, store: ColdStore, settings: EncryptionSettings) -> None:
        self.last_error = ""  # why the file cannot be used as it was read last; empty when it can
        self._appliance = appliance
        self._store = store
        self._settings = settings

    def uses(self) -> list[MasterKeyUse]:
        """Return the master keys in use, in the order of their file, and what each is needed for."""
        return self._store.keyring.master_key_uses()

    def read(self) -> MasterKeys | KeyringError:
        """Return what the file holds, or why it cannot be used. Blocks, as long as the file system does."""
        assert self._settings.master_key is not None
        try:
            return load_master_keys(self._settings.master_key)
        except KeyringError as problem:
            return problem

    async def refresh(self, keys: MasterKeys | KeyringError, *, is_dry_run: bool = False) -> None:
        """Use what `read` returned; with `is_dry_run` only see whether that would do.

        Raises ApplianceError: BAD_POLICY, or TIER_FULL where the wraps could not be replaced; the keys read
        before still hold then.
        """
        try:
            if isinstance(keys, KeyringError):
                raise keys
            await self._appliance.keep_store(lambda: self._use(keys, is_dry_run))
        except (KeyringError, CopyError) as problem:
            refused = _as_error(problem)
            if not is_dry_run:
                self.last_error = refused.message
            raise refused from problem
        if not is_dry_run:
            self.last_error = ""

    async def use(self, keys: MasterKeys | KeyringError) -> None:
        """Use what `read` returned after a change of the file. Never raises."""
        try:
            await self.refresh(keys)
        except ApplianceError as problem:
            log.error("the master keys read before still hold: %s", problem.message)

    def _use(self, keys: MasterKeys, is_dry_run: bool) -> None:
        """Blocks; in the store's thread."""
        keyring = self._store.keyring
        if is_dry_run:
            keyring.check(keys)
            return
        before = [use.id for use in keyring.master_key_uses()]
        num_new = keyring.take(keys)
        if num_new or before != list(keys.ids):
            log.info("master key %s is in force; %d data keys wrapped anew", keys.current_id, num_new)


def _as_error(problem: KeyringError | CopyError) -> ApplianceError:
    if isinstance(problem, KeyringError):
        return error("BAD_POLICY", str(problem))
    return error("TIER_FULL", f"data keys are not wrapped anew: {problem}; make room beside the segments")
