"""`kvtier doctor`: is this host ready, is the daemon well, and if not, what to do."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import grpc

from ...v1 import admin_pb2
from ...v1.admin_pb2_grpc import AdminServiceStub
from ..preflight.facts import BundleWorth, Facts, RunningDaemon
from ..preflight.table import examine
from ..preflight.verdicts import Check, CheckVerdict
from . import EXIT_FAILED, EXIT_OK
from .output import console, name_of_tier, print_json
from .settings_options import load, settings_options
from .target import TIMEOUT_S, connect, failure, json_option, resolve, target_option

_STYLES = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "bold red"}


@click.command()
@settings_options
@target_option
@json_option
def doctor(policy: Path | None, overrides: Sequence[str], target: str | None, as_json: bool) -> None:
    """Check this host against the settings, and a running daemon if there is one.

    Every line is ok, warn (slower or riskier than it could be) or fail (it will not work), with the
    fix. Exit code 1 when a line is fail.

    \b
    Example:
      kvtier doctor --policy /etc/kvtier/policy.yaml
      kvtier doctor --json | jq '.checks[] | select(.verdict != "ok")'
    """
    settings = load(policy, overrides)
    # An address in the settings is the better guess: the daemon in question listens there.
    address = resolve(target) if target or policy is None else settings.listen[0]
    checks = examine(Facts(settings, ask_daemon(address, was_named=target is not None)), settings)
    if as_json:
        print_json(report(checks))
    else:
        show(checks)
    raise SystemExit(EXIT_FAILED if any(c.verdict is CheckVerdict.FAIL for c in checks) else EXIT_OK)


def ask_daemon(target: str, was_named: bool) -> RunningDaemon:
    """Ask a daemon for its status and its audits."""
    with connect(target) as channel:
        stub = AdminServiceStub(channel)
        try:
            status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            audit = stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60)
        except grpc.RpcError as error:
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return RunningDaemon(target, was_named, is_silent=is_silent, error=failure(error, target).message)
    backends = {name_of_tier(tier.tier, status.ladder): tier.backend for tier in status.tiers}
    return RunningDaemon(
        target,
        was_named,
        reachable=True,
        version=status.version,
        draining=status.draining,
        policy_problem=status.policy.last_error,
        source_problem=status.source.problem,
        problems=tuple(audit.problems),
        backends=backends,
        offline=tuple(name_of_tier(tier.tier, status.ladder) for tier in status.tiers if tier.is_offline),
        memory_bytes=sum(tier.capacity_bytes for tier in status.tiers if "memfd" in tier.backend),
        bundles=tuple(
            BundleWorth(*(getattr(one, field) for field in BundleWorth._fields))
            for one in status.source.bundles
        ),
    )


def report(checks: Sequence[Check]) -> dict[str, object]:
    """Return the checks as plain values."""
    verdicts = Counter(check.verdict for check in checks)
    return {
        "num_ok": verdicts[CheckVerdict.OK],
        "num_warn": verdicts[CheckVerdict.WARN],
        "num_fail": verdicts[CheckVerdict.FAIL],
        "checks": [{**check._asdict(), "verdict": check.verdict.value} for check in checks],
    }


def show(checks: Sequence[Check]) -> None:
    """Print one line a check, and the fix below what needs one."""
    screen = console()
    width = min(30, max(len(check.name) for check in checks))
    for check in checks:
        screen.print(f"{check.verdict.value:<5}", style=_STYLES[check.verdict], end="")
        screen.print(f"{check.name:<{width}}  {check.detail}", markup=False, soft_wrap=True)
        if check.fix:
            screen.print(f"     {'':<{width}}  fix: {check.fix}", markup=False, style="dim", soft_wrap=True)
    verdicts = Counter(check.verdict.value for check in checks)
    screen.print(f"\n{verdicts['ok']} ok, {verdicts['warn']} warn, {verdicts['fail']} fail")
