"""The contract of a GPU, its implementation on CUDA, and memory that its copy engines reach.

Memory, streams and events are all that kvtier needs of a device.
Imported by `tiers/gpu` and `appliance/gpu`.
"""
