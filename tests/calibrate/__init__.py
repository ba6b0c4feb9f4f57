"""Calibration: what is allocated, measured, kept and written."""
