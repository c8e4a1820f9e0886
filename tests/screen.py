"""What a terminal shows of the bytes that were written to it, as far as our panel's codes go."""

import re

_TOKEN = re.compile(
    r"\x1b\[(?P<args>[?0-9;]*)(?P<code>[A-Za-z])|(?P<move>[\r\n])|(?P<text>[^\x1b\r\n]+)"
)


class Screen:
    """Endless downwards: what scrolled away is there, too."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
            if token["text"] is not None:
                self._print(token["text"])
            elif token["move"] is not None:
                self._move(token["move"])
            else:
                self._obey(token["code"], token["args"])

    def _print(self, text: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _move(self, how: str) -> None:
        self._column = 0
        if how == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")

    def _obey(self, code: str, args: str) -> None:
        match code:
            case "A":
                self._row -= int(args)
                assert self._row >= 0, "it moved above the first line"
            case "J":
                del self.lines[self._row + 1 :]
                self.lines[self._row] = ""
            case "K":
                self.lines[self._row] = self.lines[self._row][: self._column]
            case "m" | "h" | "l":
                pass
            case _:
                raise AssertionError(f"unknown code {code}")
