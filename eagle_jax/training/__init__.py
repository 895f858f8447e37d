"""Losses, training-time test and optimiser steps for the draft heads and the bundled target. Pure functions."""
