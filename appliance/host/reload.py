"""Reload: another policy comes into force without a restart, as a whole or not at all.

    read -> check -> compare -> prepare what can fail -> one event into the planner -> tell the shell's parts

Everything that can go wrong does so before the event: the file, settings that need a restart, a tier smaller
than what is pinned in it, policies that cannot be built, memory or disk that is not there. Then nothing has
changed, the last good policy stays in force, and why is in the log, in the status and in the metrics. After
the event nothing can fail; a tier that shrinks does so step by step (core/capacity/resizing.py).
One thing of a refused file is applied: members and readers that it does not name any more are refused from
then on, because no setting that needs a restart may hold back a revocation.

A policy has a generation, counted from 1 at the start. A caller that applies one may name the generation it
was made for, and is refused when another was applied meanwhile: two administrators do not undo each other
unseen.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ...tiers.base import ColdStoreError
from ...tiers.memory.engine import ExtentEngine
from ...v1.shm import extent_file_bytes
from ..appliance import Appliance
from ..compression.profiles import Profiles, read_profiles
from ..config import (
    Change,
    Loaded,
    Origin,
    Settings,
    SettingsError,
    changes,
    needing_restart,
    note_of_empty,
)
from ..core.events import PolicyChanged
from ..detached import detached
from ..errors import ApplianceError, StartError, error
from ..preflight import HELD_BYTES
from ..preflight.checks_host import check_memory
from ..preflight.facts import Facts
from ..preflight.table import RELOAD, examine, failed, objections, sentence
from ..preflight.verdicts import CheckVerdict
from ..security.key_rotation import KeyRotation
from ..security.principals import covers
from ..server.ports import AppliedPolicy, ReloadStatus
from ..tasks import Tasks

log = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_LOGGED_CHANGES = 20
MAX_LOGGED_LIST = 60  # characters


class Reload:
    """Applies policies one at a time, in the order of the requests. Owned by the event loop.

    `parts` are called with every new policy after the planner; they must not fail. `prefault` makes the
    memory of new extents; it blocks.
    """

    def __init__(self, loaded: Loaded, appliance: Appliance, prefault: Callable[[], None]) -> None:
        self.origin = loaded.origin or Origin()
        self.loaded = loaded  # in force
        self.parts: list[Callable[[Settings], None]] = []
        self.rotation: KeyRotation | None = None  # reads its file again with every policy
        self.profiles: Profiles = {}  # of the policy in force, for `parts`
        self.status = ReloadStatus(applied_at=appliance.clock())
        self._appliance = appliance
        self._planner = appliance.planner
        self._log_tier = self._planner.core.ladder.log_tier
        self._prefault = prefault
        self._prefaulting: Tasks[None] = Tasks()
        self._turn = asyncio.Lock()
        self._readings: set[asyncio.Future[Any]] = set()  # of files, which may hang
        self._is_closed = False
        self._file_text = loaded.text  # as read last
        self._accepted = loaded.settings  # of the last policy that was not refused

    async def file_changed(self) -> None:
        """Read the policy file after a change, unless its text was read already.

        (At SIGHUP, say; another policy may have been applied since.)
        """
        if await detached(self.origin.read) != self._file_text:
            await self.from_file()

    async def from_file(self) -> AppliedPolicy | None:
        """Read the policy file again, and the master keys.

        Never raises: a policy that is refused is logged; None is returned.
        """
        if self.origin.path is None and self.rotation is not None:
            await self.rotation.use(await self._read(self.rotation.read))
            return None
        try:
            return await self.apply()
        except ApplianceError as problem:
            now = self.status.generation
            log.error("the policy file is refused, generation %d runs: %s", now, problem.message)
            return None

    async def apply(
        self, text: str | None = None, name: str = "", *, is_dry_run: bool = False, generation: int = 0
    ) -> AppliedPolicy:
        """Bring the policy in `text` into force, or the file's; with `is_dry_run` only say what would change.

        `generation`: of the policy this one is meant to replace; 0: whichever. Raises ApplianceError
        (BAD_POLICY, NEEDS_RESTART, GENERATION_CONFLICT, TIER_FULL); nothing has changed then, but what a file
        that is refused revokes.
        """
        async with self._turn:
            loaded = None
            try:
                loaded = await self._load(text, name, is_dry_run, generation)
                return await self._apply(loaded, text is None, is_dry_run)
            except ApplianceError as problem:
                if not is_dry_run:
                    self.status.num_refused += 1
                    if text is None and problem.reason != "GENERATION_CONFLICT" and self.origin.path:
                        if not self.status.last_error:
                            self.status.refused_at = self._appliance.clock()
                        self.status.last_error = problem.message
                if loaded is None or problem.reason != "NEEDS_RESTART" or (text is None and not is_dry_run):
                    raise
                refused = problem
        # The disk or the store may hang, and no revocation may wait for the turn meanwhile.
        wanted, held = loaded.settings, self.held_bytes()
        wrong = await self._read(lambda: objections(wanted, *held))
        more = f"; a daemon would not start with them: {sentence(wrong)}" if wrong else ""
        raise error(refused.reason, f"{refused.message}{more}") from refused

    async def close(self) -> None:
        """Wait for memory that is being made, and for a policy that comes into force; not for files."""
        self._is_closed = True
        for reading in self._readings:
            reading.cancel()
        async with self._turn:
            await self._prefaulting.settle()

    def held_bytes(self) -> tuple[int, int]:
        """Return how much host memory the memory tiers have, and how much of it is in huge pages."""
        tiers, now = self.loaded.settings.tiers, self._planner.changes
        num_extents = sum(now.num_units(tier) for tier in tiers.host_memory)
        num_bytes = num_extents * extent_file_bytes(tiers.dram.extent_bytes)
        engines = [one for one in self._appliance.engines.values() if isinstance(one, ExtentEngine)]
        is_huge = all(report.huge_pages for one in engines for report in one.reports())
        return num_bytes, num_bytes if is_huge else 0

    # ------------------------------------------------------------------------------------ internals

    async def _read(self, function: Callable[[], Result]) -> Result:
        """Return what `function` reads of the administrator's files. `close` cancels it, as they may hang."""
        if self._is_closed:
            raise asyncio.CancelledError
        reading = asyncio.ensure_future(detached(function))
        self._readings.add(reading)
        try:
            return await reading
        finally:
            self._readings.discard(reading)

    async def _load(self, text: str | None, name: str, is_dry_run: bool, generation: int) -> Loaded:
        """Return the policy in `text`, or the file's. Raises ApplianceError."""
        status = self.status
        if generation not in (0, status.generation):
            message = (
                f"generation {generation} is not in force any more, {status.generation} is; look at it first"
            )
            raise error("GENERATION_CONFLICT", message)
        if text is None and self.origin.path is None:
            raise error(
                "BAD_POLICY", "this daemon has no policy file; start it with --policy, or send a policy"
            )
        if text is None and not is_dry_run:
            self._file_text = await self._read(self.origin.read)
        try:
            if await self._read(lambda: self._names_new_code(text, name)):
                what = "policy.allowed_modules (which code may run is decided at the start)"
                raise error("NEEDS_RESTART", f"nothing is changed; these need a restart: {what}")
            return await self._read(lambda: self.origin.load(text, name))
        except SettingsError as problem:
            raise error("BAD_POLICY", str(problem)) from problem

    async def _apply(self, loaded: Loaded, is_file: bool, is_dry_run: bool) -> AppliedPolicy:
        """Bring a policy into force, or what the file revokes. Raises ApplianceError."""
        try:
            found = await self._bring(loaded, is_dry_run)
        except ApplianceError as problem:
            if not is_file or is_dry_run or not self._revoke(loaded.settings):
                raise
            said = "but members that it does not name for the same tenant, and readers, are refused now"
            raise error(problem.reason, f"{problem.message}; {said}") from problem
        if is_file and not is_dry_run:
            self.status.last_error = ""
        return AppliedPolicy(self.status.generation, found)

    async def _bring(self, loaded: Loaded, is_dry_run: bool) -> list[Change]:
        """Bring a policy into force; return what changes. Raises ApplianceError."""
        status, wanted = self.status, loaded.settings
        found = changes(self.loaded.settings, wanted)
        if stuck := needing_restart(found):
            words = ", ".join(f"{c.key} ({c.was} -> {c.becomes})" for c in stuck)
            raise error("NEEDS_RESTART", f"nothing is changed; these need a restart: {words}")
        if self.rotation is not None:  # before the planner is asked: things go on meanwhile
            await self.rotation.refresh(await self._read(self.rotation.read), is_dry_run=is_dry_run)
        checks = await self._read(lambda: examine(Facts(wanted), wanted, RELOAD))
        if wrong := failed(checks):
            raise error("BAD_POLICY", sentence(wrong))
        try:
            profiles = await self._read(lambda: read_profiles(wanted.compression))
        except StartError as problem:
            raise error("BAD_POLICY", str(problem)) from problem
        change = self._event(wanted)
        self._check(change, wanted)
        if is_dry_run:
            return found
        if self._log_tier in change.num_units:
            await self._resize_store(change, wanted)
        if found:
            self.profiles = profiles
            self._appliance.step(change)
            self._adopt(wanted, found)
            if change.num_units:
                self._prefaulting.start(asyncio.to_thread(self._prefault))  # it may be used meanwhile
        self.loaded, self._accepted = loaded, wanted
        status.num_applied += 1
        status.applied_at = self._appliance.clock()
        if loaded.gathered.empty_file:
            log.warning("%s", note_of_empty(loaded.gathered.empty_file))
        return found

    def _adopt(self, settings: Settings, found: list[Change]) -> None:
        """Tell the parts of the next generation."""
        for part in self.parts:
            part(settings)
        self.status.generation += 1
        for one in found[:MAX_LOGGED_CHANGES]:
            said = one.key, brief(one.was), brief(one.becomes)
            log.info("policy generation %d: %s: %s -> %s", self.status.generation, *said)

    def _revoke(self, wanted: Settings) -> bool:
        """Refuse the members and readers that a file which is refused does not name; return whether there are
        any. Those that a later file names again, refused or not, are let in again. Without tenants it would
        let all callers in, which waits for the rest of it."""
        before, named = self._accepted, wanted.tenants
        tenants, observe = before.tenants, before.observe
        if named:
            kept = {
                name: [
                    one
                    for one in (named[name].members if name in named else ())
                    if any(covers(member, one) for member in tenant.members)
                ]
                for name, tenant in tenants.items()
            }
            tenants = {
                name: tenant.model_copy(update={"members": kept[name]}) for name, tenant in tenants.items()
            }
        if not wanted.observe.is_for_anyone(bool(named)):
            allowed = wanted.observe.reader_tokens
            if observe.is_for_anyone(bool(before.tenants)):
                observe = observe.model_copy(update={"readers": sorted(allowed)})
            elif observe.reader_tokens:
                observe = observe.model_copy(update={"readers": sorted(observe.reader_tokens & allowed)})
        settings = before.model_copy(update={"tenants": tenants, "observe": observe})
        if found := changes(self.loaded.settings, settings):
            self._adopt(settings, found)
            self.loaded = self.loaded._replace(settings=settings)
        return bool(changes(before, settings))

    def _names_new_code(self, text: str | None, name: str) -> bool:
        """Whether a policy allows other modules than those of the start.

        Asked before it is checked, because checking a policy's name imports its module. Raises SettingsError.
        """
        section = self.origin.gather(text, name).values.get("policy")
        modules = section.get("allowed_modules") if isinstance(section, dict) else None
        return (modules or []) != self.loaded.settings.policy.allowed_modules

    def _event(self, settings: Settings) -> PolicyChanged:
        """Return the event that brings `settings` into force. It names only tiers of another size."""
        now = self._planner.changes
        counts = {tier: size.num_units for tier, size in settings.tiers.sizes.items()}
        resized = {tier: count for tier, count in counts.items() if count != now.num_units(tier)}
        choice = settings.policy.choice()
        return PolicyChanged(settings.planner_options(), choice, resized)

    def _check(self, change: PolicyChanged, settings: Settings) -> None:
        """Refuse what the planner or the host cannot do. Raises ApplianceError."""
        problems = self._planner.changes.objections(change)
        fixed = [tier for tier in change.num_units if not hasattr(self._appliance.engines[tier], "give_back")]
        if fixed:
            names = ", ".join(f"tiers.{tier.label}.capacity" for tier in fixed)
            raise error("NEEDS_RESTART", f"nothing is changed; these need a restart: {names}")
        if problems:
            raise error("BAD_POLICY", "; ".join(problems))
        memory = check_memory(Facts(settings).host, settings, self.held_bytes()[0])
        if memory.verdict is CheckVerdict.FAIL:
            raise error("TIER_FULL", str(memory))

    async def _resize_store(self, change: PolicyChanged, settings: Settings) -> None:
        """Create the files of new segments. Raises ApplianceError."""
        try:
            await self._appliance.resize_store(change.num_units[self._log_tier])
            self._check(change, settings)  # things went on meanwhile
        except ColdStoreError as problem:
            raise error("TIER_FULL", f"tiers.nvme.capacity: {problem}") from problem
        except ApplianceError:
            await self._appliance.resize_store(self._planner.changes.num_units(self._log_tier))
            raise


def check_successor(held_bytes: int, huge_bytes: int) -> None:
    """Raise ApplianceError where the next daemon, perhaps of another version, would not start."""
    command = [sys.executable, "-P", "-m", "kvtier.appliance.cli", *sys.argv[1:], "--check"]
    variables = {**os.environ, HELD_BYTES: f"{held_bytes} {huge_bytes}"}  # other versions may ignore it
    checked = subprocess.run(command, capture_output=True, text=True, env=variables)
    if checked.returncode:
        raise error("BAD_POLICY", checked.stderr.strip().removeprefix("Error: "))


def brief(value: object) -> str:
    """Return a setting in a few words for the log; a section, such as a tenant, and a long list in one."""
    if isinstance(value, dict):
        return "given"
    if isinstance(value, list):
        text = ", ".join(map(str, value))
        return f"[{text}]" if len(text) <= MAX_LOGGED_LIST else f"{len(value)} entries"
    return "none" if value is None else str(value)
