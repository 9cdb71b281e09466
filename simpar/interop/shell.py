"""Launch scripts followed without running a command: assignments, arrays, if, case, for, functions, eval, bash -c.

Conditions are evaluated as sh does; a file that is asked for exists, an unknown command succeeds, an unknown $(...) is empty.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass, field
from itertools import pairwise

from simpar.errors import InputError
from simpar.interop.shell_conditions import holds
from simpar.interop.shell_words import Expander, Token, Variables, tokens

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.S)
_DECLARE = frozenset({"export", "local", "declare", "readonly", "typeset"})
_ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;"})
_MOST_COMMANDS = 20_000
_MOST_CHARACTERS = 1_000_000


@dataclass
class Script:
    """What a script would run.

    Attributes:
        commands: words of every command reached, expanded, in order.
        variables: at the end.
        unset: variables that it reads and nobody has set.
        sourced: other scripts that it reads, which were not read.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: Variables = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    sourced: list[str] = field(default_factory=list)

    def flags(self, prefix: str = "--") -> list[str]:
        """Words of the last command that has the most flags."""
        if not self.commands:
            return []
        return max(reversed(self.commands), key=lambda words: sum(w.startswith(prefix) for w in words))


def read_script(text: str, file: str = "", environment: dict[str, str] | None = None) -> Script:
    """The commands of a script.

    Args:
        environment: variables that were set before it starts.

    Raises:
        InputError: a quotation or a bracket that never closes.
    """
    script = Script()
    script.variables.update({name: [value] for name, value in (environment or {}).items()})
    _Run(script, file).source(text)
    return script


class _Run:
    """One pass over a script. Statements that are not reached are parsed with `live` off."""

    def __init__(self, script: Script, file: str) -> None:
        self.script, self.file = script, file
        self.functions: dict[str, list[Token]] = {}
        self.expand = Expander(script.variables, self._substitute, script.unset)
        self.depth = self.count = 0

    def source(self, text: str) -> bool:
        """Run a text; the status of its last command."""
        self.depth += 1
        try:
            return self._list(_Cursor(tokens(text, self.file)), True) if self.depth < 12 else True
        finally:
            self.depth -= 1

    def _list(self, at: _Cursor, live: bool) -> bool:
        """Statements up to a closing word; && and || decide what is reached."""
        status = True
        reached = live
        while (token := at.peek()) is not None and not (token.text in _ENDS and at.command_position()):
            if token.is_operator and token.text not in ("(",):
                at.next()
                # What is skipped leaves the status as it was.
                reached = live and {"&&": status, "||": not status}.get(token.text, True)
                continue
            found = self._statement(at, reached)
            status = found if reached else status
        return status

    def _statement(self, at: _Cursor, live: bool) -> bool:
        word = at.next().text
        if word == "!":
            return not self._statement(at, live)
        if word in ("{", "("):
            status = self._list(at, live)
            at.skip({"}", ")"})
            return status
        if word == "if":
            return self._if(at, live)
        if word in ("for", "select"):
            return self._for(at, live)
        if word in ("while", "until"):
            return self._while(at, live)
        if word == "case":
            return self._case(at, live)
        if word == "[[":
            return self._test(at.until("]]"), live)
        if word == "function" or (at.text() == "(" and re.fullmatch(r"[\w.-]+", word)):
            return self._function(word, at)
        return self._simple([word, *at.words()], live)

    def _if(self, at: _Cursor, live: bool) -> bool:
        done, status = False, True
        while True:
            reached = live and not done
            condition = self._list(at, reached)
            at.skip({"then"})
            found = self._list(at, reached and condition)
            status = found if reached and condition else status
            done = done or condition
            word = at.next_text()
            if word == "else":
                found = self._list(at, live and not done)
                status = found if live and not done else status
                word = at.next_text()
            if word != "elif":
                return status

    def _for(self, at: _Cursor, live: bool) -> bool:
        name = at.next_text()
        if name == "(":
            # for ((...)): the loop variable cannot be known without running it.
            at.until(")")
            at.skip({")"})
            words: list[str] = []
        else:
            words = at.words()
        at.skip_separators()
        at.skip({"do"})
        values = [f for w in words[1:] for f in self.expand.words(w)] if words[:1] == ["in"] else []
        start = at.index
        for value in values if live else []:
            at.index = start
            self.script.variables[name] = [value]
            self._list(at, True)
        at.index = start
        self._list(at, False)
        at.skip({"done"})
        return True

    def _while(self, at: _Cursor, live: bool) -> bool:
        condition = self._list(at, live)
        at.skip({"do"})
        self._list(at, live and condition)
        at.skip({"done"})
        return True

    def _case(self, at: _Cursor, live: bool) -> bool:
        subject = self.expand.text(at.next_text())
        at.skip_separators()
        at.skip({"in"})
        done = False
        while at.skip_separators() and at.text() not in ("esac", None):
            patterns = []
            while (token := at.peek()) is not None and token.text != ")":
                if token.text not in ("|", "("):
                    patterns.append(self.expand.text(token.text))
                at.next()
            at.skip({")"})
            match = any(fnmatch.fnmatchcase(subject, p) for p in patterns)
            self._list(at, live and match and not done)
            done = done or match
            at.skip({";;"})
        at.skip({"esac"})
        return True

    def _function(self, word: str, at: _Cursor) -> bool:
        name = at.next_text() if word == "function" else word
        while at.text() in ("(", ")", "\n"):
            at.next()
        start = at.index
        at.skip({"{"})
        self._list(at, False)
        at.skip({"}"})
        self.functions[name] = at.found[start + 1 : at.index - 1]
        return True

    def _simple(self, raw: list[str], live: bool) -> bool:
        if not live or self.count > _MOST_COMMANDS:
            return True
        self.count += 1
        while raw and (match := _ASSIGN.fullmatch(raw[0])):
            self._assign(match)
            raw = raw[1:]
        if not raw:
            return True
        if raw[0] in _DECLARE:
            for word in raw[1:]:
                if match := _ASSIGN.fullmatch(word):
                    self._assign(match)
            return True
        if raw[0] in ("[", "test"):
            return self._test([w for w in raw[1:] if w != "]"], live)
        words = [f for w in raw for f in self.expand.words(w)]
        return self._command(words)

    def _command(self, words: list[str]) -> bool:
        name = words[0] if words else ""
        if name in (":", "", "true", "echo", "set", "unset", "exit", "return", "cd", "mkdir", "shift"):
            return True
        if name == "false":
            return False
        if name in ("source", "."):
            self.script.sourced += words[1:2]
            return True
        if name == "eval":
            return self.source(" ".join(words[1:]))
        if name in self.functions:
            return self._call(name, words[1:])
        self.script.commands.append(words)
        for before, word in pairwise(words):
            # srun bash -c "torchrun ..." and the like
            if before in ("-c", "-lc") and " " in word:
                self.source(word)
        return True

    def _call(self, name: str, arguments: list[str]) -> bool:
        variables = self.script.variables
        kept = {k: variables[k] for k in ("@", *map(str, range(1, 10))) if k in variables}
        variables["@"] = arguments
        variables.update({str(i + 1): [a] for i, a in enumerate(arguments[:9])})
        self.depth += 1
        status = self._list(_Cursor(self.functions[name]), True) if self.depth < 12 else True
        self.depth -= 1
        variables.update(kept)
        return status

    def _assign(self, match: re.Match[str]) -> None:
        name, index, plus, raw = match.groups()
        variables = self.script.variables
        if raw.startswith("(") and raw.endswith(")"):
            inner = [t.text for t in tokens(raw[1:-1], self.file) if not t.is_operator]
            found = [f for w in inner for f in self.expand.words(w)]
            variables[name] = [*variables.get(name, []), *found] if plus else found
        elif index is not None:
            place = self.expand.arithmetic(index)
            values = variables.get(name, [])
            variables[name] = [*values[:place], self.expand.text(raw), *values[place + 1 :]]
        else:
            text = self.expand.text(raw)
            variables[name] = [" ".join(variables.get(name, [])) + text] if plus else [text]
        if sum(map(len, variables[name])) > _MOST_CHARACTERS:
            raise InputError(
                f"{self.file}: the variable {name} grows beyond {_MOST_CHARACTERS:,} characters; expected a launch script"
            )

    def _substitute(self, text: str) -> str:
        """$(...): what needs no other program."""
        text = text.strip()
        if match := re.match(r"(?:echo|expr)\s+(.*)", text, re.S):
            words = [f for t in tokens(match[1]) if not t.is_operator for f in self.expand.words(t.text)]
            return str(self.expand.arithmetic(" ".join(words))) if text.startswith("expr") else " ".join(words)
        if "scontrol show hostnames" in text and "wc -l" in text:
            return " ".join(self.script.variables.get("SLURM_NNODES", []))
        return ""

    def _test(self, raw: list[str], live: bool) -> bool:
        return holds(raw, self.expand) if live else True


class _Cursor:
    """Tokens not yet read."""

    def __init__(self, found: list[Token]) -> None:
        self.found, self.index = found, 0

    def peek(self) -> Token | None:
        return self.found[self.index] if self.index < len(self.found) else None

    def text(self) -> str | None:
        token = self.peek()
        return token.text if token else None

    def next(self) -> Token:
        token = self.peek() or Token("", 0)
        self.index += 1
        return token

    def next_text(self) -> str:
        return self.next().text

    def command_position(self) -> bool:
        """Whether the token at hand starts a command (a closing word means nothing elsewhere)."""
        return (
            self.index == 0
            or self.found[self.index].is_operator
            or self.found[self.index - 1].is_operator
            or (self.found[self.index - 1].text in _ENDS | {"{", "!"})
        )

    def skip_separators(self) -> bool:
        while (token := self.peek()) is not None and token.is_operator and token.text in ("\n", ";"):
            self.next()
        return self.peek() is not None

    def skip(self, words: set[str]) -> None:
        self.skip_separators()
        if self.text() in words:
            self.next()

    def words(self) -> list[str]:
        """Words up to the end of the command."""
        found = []
        while (token := self.peek()) is not None and not token.is_operator:
            found.append(token.text)
            self.next()
        return found

    def until(self, word: str) -> list[str]:
        found: list[str] = []
        while (token := self.peek()) is not None and token.text != word:
            found.append(token.text)
            self.next()
        self.next()
        return [w for w in found if w != "\n"]


def options(words: list[str]) -> dict[str, list[str]]:
    """Flag -> its values: "--a 1 --b --c x y", "--a=1"; dashes and underscores are the same."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            # An array element such as "--fp8-format hybrid" may hold the value too.
            head, *values = shlex.split(word) if " " in word and word.count("'") % 2 == 0 else [word]
            name, equals, value = head[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = [value, *values] if equals else values
        elif name:
            found[name].append(word)
    return found


__all__ = ["Script", "options", "read_script"]
