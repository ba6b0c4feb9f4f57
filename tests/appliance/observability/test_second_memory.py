"""A memory between dram and nvme is shown by its name, in its place, wherever tiers are."""

from ...cli.conftest import run
from .conftest import Shown, Start, use


def test_a_tier_that_the_settings_name_is_shown_everywhere(start: Start) -> None:
    shown: Shown = start(further={"cxl": {"kind": "memory", "capacity": "2MiB"}})
    use(shown, session_id="agent-42")
    found = shown.snapshot()
    assert [tier["tier"] for tier in found["tiers"]] == ["dram", "cxl", "nvme"]
    assert list(found["totals"]["found"]) == ["hbm", "dram", "cxl", "nvme"]
    assert list(found["history"]["found"]) == ["hbm", "dram", "cxl", "nvme"]
    assert found["totals"]["found"]["cxl"] > 0
    assert {("dram", "cxl"), ("cxl", "nvme")} <= {(e["source"], e["target"]) for e in found["edges"]}
    assert any(decision["tier"] == "cxl" for decision in found["decisions"])
    metrics = shown.get("/metrics")
    assert 'kvtier_tier_capacity_bytes{tier="cxl"} 2.097152e+06' in metrics
    assert 'kvtier_lookup_blocks_total{outcome="cxl"}' in metrics
    assert 'kvtier_copy_bytes_total{source="dram",target="cxl"}' in metrics
    text = run("top", "--once", target=shown.target).output
    assert text.index("dram ") < text.index("cxl ") < text.index("nvme ")
    assert "cxl" in run("status", target=shown.target).output
    assert "in cxl" in run("why", "session", "agent-42", target=shown.target).output
