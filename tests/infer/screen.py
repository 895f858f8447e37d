"""A terminal to write on, as a test reads it."""

from __future__ import annotations

import re


class Screen:
    """As much of a VT100 as the chat writes: rows of text, a cursor, a scroll region."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.saved = (0, 0)
        self.bottom = rows - 1

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    def down(self) -> None:
        if self.row == self.bottom:
            self.cells[: self.bottom + 1] = [*self.cells[1 : self.bottom + 1], [" "] * self.columns]
        else:
            self.row = min(self.row + 1, self.rows - 1)

    def resize(self, rows: int) -> None:
        """Another height, as xterm does it: text stays where it is, or moves up with the cursor where it must."""
        gone = max(self.row - rows + 1, 0)
        self.cells = [*self.cells[gone : gone + rows], *([" "] * self.columns for _ in range(rows - self.rows))]
        self.row, self.rows, self.bottom = self.row - gone, rows, rows - 1

    def write(self, text: str) -> None:
        for sequence, number, rest, letter, char in re.findall(
            r"(\x1b(?:\[(\d*)([;\d]*)([A-Za-z])|[78D]))|(.|\n)", text, flags=re.DOTALL
        ):
            if char == "\n":
                self.down()
                self.column = 0
            elif char:
                if self.column == self.columns:
                    self.down()
                    self.column = 0
                self.cells[self.row][self.column] = char
                self.column += 1
            elif sequence == "\x1bD":
                self.down()
            elif sequence == "\x1b7":
                self.saved = self.row, self.column
            elif sequence == "\x1b8":
                self.row, self.column = self.saved
            elif letter == "A":
                self.row -= int(number)
            elif letter == "H":
                self.row, self.column = int(number) - 1, int(rest[1:]) - 1
            elif letter == "K":
                self.cells[self.row] = [" "] * self.columns
            elif letter == "J":
                assert not number, sequence
                self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
                self.cells[self.row + 1 :] = [[" "] * self.columns for _ in range(self.rows - self.row - 1)]
            elif letter == "r":  # also sends the cursor home
                self.bottom = int(rest[1:]) - 1 if rest else self.rows - 1
                self.row = self.column = 0
            else:
                assert letter == "m", sequence
