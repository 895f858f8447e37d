"""What a head is worth: tau, n-alpha, acceptance by position, calibration."""
