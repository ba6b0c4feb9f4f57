"""Memory of GPUs as a tier: engine and copier of hbm, device contract, runtimes' pages, decoding.

`device/` is the contract and CUDA, `pages/` the way into a runtime's pages, `decode/` records from nvme.
Imported by `appliance/gpu`, `host` and `preflight`.
"""
