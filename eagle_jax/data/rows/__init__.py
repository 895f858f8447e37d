"""Rows of data sets: which conversation or text a row holds, read strictly."""
