"""KeyRotation: another master key is taken while the daemon runs, from the file that the policy names.

    file watched, SIGHUP, policy applied -> read -> does it open everything? -> wrap anew -> use

The file is read again when it changes, as certificates and tokens are, and with every reload. A file that
cannot be used changes nothing: the keys read before still hold. A reload is refused for it as a whole,
because the next start would be, and the administrator that reloads can mend it; a change that the watch
noticed is reported in the log, in the status and to Prometheus.

Keys are used in the cold store's own thread: a tenant's key may be made or destroyed at the same time. The
file is read elsewhere (detached.py): one that hangs must not hold up the store. What an object store
keeps is wrapped anew in the background, as soon as it answers.
"""

import asyncio
import logging
from collections import Counter

from ...sources.objects.problems import StoreError
from ...tiers.base import CopyError
from ...tiers.cold.engine import ColdStore
from ...tiers.encryption.keyring import MasterKeyUse
from ...tiers.encryption.master_keys import KeyringError, MasterKeys, load_master_keys
from ..appliance import Appliance
from ..config import EncryptionSettings
from ..detached import detached
from ..errors import ApplianceError, disk_error, error
from ..transfer.object_edge import ObjectEdge

log = logging.getLogger(__name__)


class KeyRotation:
    """Applies changes of the master key file. Owned by the event loop.

    `settings` must name a file, and `store` and `source`, one of them at least, have been given its keys.
    """

    def __init__(
        self,
        appliance: Appliance,
        store: ColdStore | None,
        source: ObjectEdge | None,
        settings: EncryptionSettings,
        keys: MasterKeys,
    ) -> None:
        self.last_error = ""  # why the file cannot be used as it was read last; empty when it can
        self._appliance = appliance
        self._store = store
        self._source = source
        self._settings = settings
        self._keys = keys  # in use

    def uses(self) -> list[MasterKeyUse]:
        """Return the master keys in use, in the order of their file, and what each is needed for."""
        counts: Counter[str] = Counter()
        if self._store is not None:
            counts.update({use.id: use.num_wrapped for use in self._store.keyring.master_key_uses()})
        if self._source is not None and self._source.keys is not None:
            counts.update(self._source.keys.num_wrapped)
        current = self._keys.current_id
        return [MasterKeyUse(name, name == current, counts[name]) for name in self._keys.ids]

    def read(self) -> MasterKeys | KeyringError:
        """Return what the file holds, or why it cannot be used. Blocks, as long as the file system does."""
        assert self._settings.master_key is not None
        try:
            return load_master_keys(self._settings.master_key)
        except KeyringError as problem:
            return problem

    async def refresh(self, keys: MasterKeys | KeyringError, *, is_dry_run: bool = False) -> None:
        """Use what `read` returned; with `is_dry_run` only see whether that would do.

        Raises ApplianceError: BAD_POLICY, or TIER_FULL or DISK_FAILED where the wraps could not be replaced;
        the keys read before still hold then.
        """
        try:
            if isinstance(keys, KeyringError):
                raise keys
            if self._store is not None:
                await self._appliance.keep_store(lambda: self._use(keys, is_dry_run))
            else:
                await asyncio.to_thread(self._use, keys, is_dry_run)
        except (KeyringError, CopyError, StoreError) as problem:
            refused = _as_error(problem)
            if not is_dry_run:
                self.last_error = refused.message
            raise refused from problem
        if not is_dry_run:
            self.last_error = ""
            if self._source is not None:
                self._source.tend_keys()

    async def use(self, keys: MasterKeys | KeyringError) -> None:
        """Use what `read` returned after a change of the file. Never raises."""
        try:
            await self.refresh(keys)
        except ApplianceError as problem:
            log.error("the master keys read before still hold: %s", problem.message)

    async def file_changed(self) -> None:
        """Use what the file holds now. Never raises."""
        await self.use(await detached(self.read))

    def _use(self, keys: MasterKeys, is_dry_run: bool) -> None:
        """Blocks; in the store's thread, if there is one."""
        keyring = self._store.keyring if self._store is not None else None
        fleet = self._source.keys if self._source is not None else None
        if fleet is not None:
            fleet.check(keys)
        if is_dry_run:
            if keyring is not None:
                keyring.check(keys)
            return
        num_new = keyring.take(keys) if keyring is not None else 0
        if fleet is not None and keys.ids != self._keys.ids:
            fleet.take(keys)
        if num_new or self._keys.ids != keys.ids:
            log.info("master key %s is in force; %d data keys wrapped anew", keys.current_id, num_new)
        self._keys = keys


def _as_error(problem: KeyringError | CopyError | StoreError) -> ApplianceError:
    if not isinstance(problem, CopyError):
        return error("BAD_POLICY", str(problem))
    return disk_error(problem, "data keys are not wrapped anew")
