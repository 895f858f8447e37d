"""What the tests of training share."""

from __future__ import annotations

import pytest

from tests.training.runs import make_place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved random target with the bundled tokenizer, and rows for it."""
    return make_place(tmp_path_factory.mktemp("head"))
