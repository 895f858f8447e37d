"""Measurements of drafters: tau, n-alpha, acceptance by position, calibration."""
