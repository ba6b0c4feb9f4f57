"""`make demo-store` as a process: new hosts answer from the store, bit for bit, and it exits with 0."""

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.distributions import ROOT

if importlib.util.find_spec("transformers") is None:
    pytest.skip("no transformers: `make demo-store` installs them", allow_module_level=True)

NUM_PROMPTS = 3
SHARED_TOKENS, PROMPT_TOKENS = 1888, 2048  # in whole blocks; in whole bundles
FETCHED_TOKENS = SHARED_TOKENS + NUM_PROMPTS * (PROMPT_TOKENS - SHARED_TOKENS)


def acts(store: str) -> list[str]:
    """Run the demo; return what it printed of each host."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_store", *store.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits bit for bit" in done.stdout
    printed = re.split(r"^\d\. ", done.stdout, flags=re.MULTILINE)[1:]
    assert all(one.count("  identical") >= NUM_PROMPTS for one in printed)
    return printed


def num_fetched(act: str) -> int:
    """Return how many tokens a host says to have read from the store."""
    found = re.search(r"([\d,]+) tokens were read from the store", act)
    assert found, act
    return int(found[1].replace(",", ""))


def test_two_hosts_answer_from_a_folder_and_store_once_what_both_compute() -> None:
    first, second, third = acts("")
    assert "60 MiB are in the store" in first
    assert num_fetched(second) == num_fetched(third) == FETCHED_TOKENS
    assert third.count("  identical") == 3 * NUM_PROMPTS
    assert re.search(r"(\d+) bundles: each was stored once, and \1 times found", " ".join(third.split()))


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="no pool: `make test-mooncake`")
def test_of_a_pool_of_three_processes_one_is_killed() -> None:
    _, second, third = acts("mooncake")
    assert num_fetched(second) == FETCHED_TOKENS
    assert num_fetched(third) <= FETCHED_TOKENS, "a third of the bundles is missing, on average"
