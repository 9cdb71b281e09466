"""Conditions of sh and bash: [ ... ], [[ ... ]], test."""

from __future__ import annotations

import fnmatch
import re

from simpar.interop.shell_words import Expander


def holds(raw: list[str], expand: Expander) -> bool:
    """Whether the condition of words `raw` (as written, without its brackets) holds; a file that is asked for exists."""
    return _Test(raw, expand).value()


class _Test:
    """[ ... ] and [[ ... ]]."""

    def __init__(self, raw: list[str], expand: Expander) -> None:
        self.raw, self.expand, self.at = raw, expand, 0

    def value(self) -> bool:
        found = self._and()
        while self._take("||") or self._take("-o"):
            found = self._and() or found
        return found

    def _take(self, word: str) -> bool:
        if self.at < len(self.raw) and self.raw[self.at] == word:
            self.at += 1
            return True
        return False

    def _and(self) -> bool:
        found = self._one()
        while self._take("&&") or self._take("-a"):
            found = self._one() and found
        return found

    def _one(self) -> bool:
        if self._take("!"):
            return not self._one()
        if self._take("("):
            found = self.value()
            self._take(")")
            return found
        words: list[str] = []
        while self.at < len(self.raw) and self.raw[self.at] not in ("&&", "||", "-a", "-o", ")"):
            words.append(self.raw[self.at])
            self.at += 1
        return self._compare(words)

    def _compare(self, words: list[str]) -> bool:
        text = self.expand.text
        if len(words) == 1:
            return bool(text(words[0]))
        if len(words) == 2:
            value = text(words[1])
            return {"-z": not value, "-n": bool(value), "-v": words[1] in self.expand.variables}.get(words[0], True)
        if len(words) < 3:
            return False
        left, operator, right = text(words[0]), words[1], text(words[2])
        if operator in ("=", "=="):
            return fnmatch.fnmatchcase(left, right)
        if operator == "!=":
            return not fnmatch.fnmatchcase(left, right)
        if operator == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return False
        symbol = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}.get(operator, operator)
        return bool(self.expand.arithmetic(f"({left or 0}) {symbol} ({right or 0})"))


__all__ = ["holds"]
