"""Meshes of devices, and runs of several processes."""
