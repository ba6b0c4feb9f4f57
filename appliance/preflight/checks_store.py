"""Checks of the object store: that it can do what is needed, and that it pays."""

import math
from collections.abc import Iterable, Iterator

from .facts import BundleWorth, StoreTrial
from .verdicts import Check, fail, ok, warn

URL = "object.url"
#: What the daemon does without, at a price.
OPTIONAL = ("listed at once", "copy inside", "lifecycle")
_PLAIN = "http: what is on the way to it can read what is sent, and put other bytes in its place"
_UNPROTECTED = "what reaches the master can read, change and delete all that is pooled: no rights, no TLS"


def check_store(trial: StoreTrial | None) -> Iterator[Check]:
    """Return how trying the store of the settings went; nothing without one."""
    if trial is None:
        return
    name = "object store"
    if trial.error:
        fix = "correct what it says; tried with the environment of this command, a daemon has its own"
        yield fail(name, f"{trial.url}: {trial.error}", fix, URL)
        return
    for one in trial.results:
        if one.problem:
            verdict = warn if one.name in OPTIONAL else fail
            fix = f"kvtier objects check {trial.url} prints the rules and tries again"
            yield verdict(f"{name}, {one.name}", one.problem, fix, URL)
    if trial.url.startswith("mooncake:"):
        fix = "keep it in a network of its own, for tenants that trust all that reach it"
        yield warn(f"{name}, protection", _UNPROTECTED, fix, URL)
    if trial.travels_plain:
        fix = "an https:// endpoint; or encryption.master_key, which lets nothing be read or exchanged"
        yield warn(f"{name}, protection", _PLAIN, fix, URL)
    works = [one.name for one in trial.results if not one.problem]
    if works:
        yield ok(name, f"{trial.url}: {', '.join(works)}")


def judge_worth(bundles: Iterable[BundleWorth]) -> Iterator[Check]:
    """Return whether fetching is sooner than computing, and storing pays, in each namespace of a daemon."""
    for one in bundles:
        name = f"object store, namespace {one.namespace_id}"
        if one.share == "off":
            continue
        rule = f"{one.namespace[:16]}: off in object.namespaces"
        times = f"a bundle takes {one.fetch_s:.3g} s to fetch and {one.recompute_s:.3g} s to compute"
        if one.fetch_s >= one.recompute_s:
            fix = f"it is never fetched: {rule}, or a faster store"
            yield warn(name, times, fix, "object.namespaces")
        elif math.isinf(one.reads_to_earn):
            what = f"{times}; by object.price a fetch costs more than it saves"
            yield warn(name, what, f"{rule}, or a store nearby", "object.price")
        elif one.reads_to_earn:
            yield ok(name, f"{times}; storing it pays with use {math.ceil(one.reads_to_earn)} in three days")
        else:
            yield ok(name, times)
