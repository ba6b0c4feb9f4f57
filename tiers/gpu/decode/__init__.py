"""Encoded records decoded and hashed on the device, and the way from NVMe to HBM without a copy in DRAM.

The host decides where device and host disagree.
Imported by `appliance/gpu`.
"""
