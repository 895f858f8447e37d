"""The status row in windows that change their size under it."""

from __future__ import annotations

import os

import pytest

from infer.common.status_line import StatusLine
from tests.infer.screen import Screen


@pytest.mark.parametrize("sizes", [(8, 12), (8, 5), (12, 6, 10)], ids=str)
@pytest.mark.parametrize("above", [0, 2, 30])
def test_another_size_keeps_the_text_and_leaves_no_old_row(above, sizes, monkeypatch):
    screen = Screen(40, sizes[0])
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, screen.rows)))
    words = [f"line {number}" for number in range(above)]
    screen.write("".join(f"{word}\n" for word in words))
    with StatusLine(screen.write, True) as status:
        for number, rows in enumerate(sizes):
            screen.resize(rows)
            for part in ("a", "b"):
                words.append(f"said {number}{part}")
                screen.write(f"{words[-1]}\n")
                status.show(f"tau {number}{part}")
                assert screen.lines()[-1] == f"tau {number}{part}" and screen.bottom == rows - 2
                seen = [line for line in screen.lines()[:-1] if line]
                assert seen and seen == words[-len(seen) :]
        screen.resize(9)
    seen = [line for line in screen.lines() if line]
    assert seen and seen == words[-len(seen) :] and screen.bottom == 8
    assert screen.column == 0 and screen.lines()[screen.row - 1] == words[-1]
