"""The simulator's ladder: two tiers of host memory between the device and the log. A configuration may lack
the second one, as it may lack the device and the log."""

from kvtier.tiers.ladder import STANDARD, Ladder, TierKind, TierSpec

MAPPED = Ladder(
    (*STANDARD.specs[:-1], TierSpec("cxl", TierKind.MEMORY, readable_in_place=True), STANDARD.specs[-1])
)
#: The same where hbm is a GPU's memory.
ON_DEVICE = MAPPED.with_spec(MAPPED.device_tier, TierSpec("hbm", TierKind.DEVICE))
HBM, DRAM, CXL, NVME = MAPPED.tiers
