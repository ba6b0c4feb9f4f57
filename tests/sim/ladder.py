"""The simulator's ladder: two tiers of host memory between the device and the log. A configuration may lack
the second one, as it may lack the device and the log."""

from kvtier.tiers import ladder
from kvtier.tiers.ladder import with_memory

MAPPED = with_memory(["cxl"])
#: The same where hbm is a GPU's memory.
ON_DEVICE = with_memory(["cxl"], ladder.ON_DEVICE)
HBM, DRAM, CXL, NVME = MAPPED.tiers
