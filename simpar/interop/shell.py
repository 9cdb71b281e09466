"""Launch scripts read without running them: variables, arrays, arithmetic and line continuations of sh and bash."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from simpar.errors import InputError

_ASSIGN = re.compile(r"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?|readonly\s+)?([A-Za-z_]\w*)(\+?=)(.*)$", re.S)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?([-=+])((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
_SAFE = re.compile(r"^[\d\s+*/%()-]+$")
_CONTROL = frozenset({"if", "then", "else", "elif", "fi", "for", "do", "done", "while", "case", "esac", "function"})


@dataclass
class Script:
    """What a script would run.

    Attributes:
        commands: words of every command, expanded, in order.
        variables: at the end.
        branches: the script decides something (if, case): all of it was read as if it ran.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    branches: bool = False

    def flags(self, prefix: str = "--") -> list[str]:
        """Words of the last command that has the most flags."""
        if not self.commands:
            return []
        return max(reversed(self.commands), key=lambda words: sum(w.startswith(prefix) for w in words))


def read_script(text: str, file: str = "") -> Script:
    """The commands of a script.

    Raises:
        InputError: a quotation that never closes.
    """
    script = Script()
    for line in _logical_lines(text, file):
        _line(line, script)
    return script


def _logical_lines(text: str, file: str) -> Iterator[str]:
    """Lines with continuations, open quotes and open arrays joined."""
    held = ""
    for raw in text.replace("\\\r\n", " ").splitlines():
        line = raw.rstrip()
        if not held and line.lstrip().startswith("#"):
            continue
        if held and line.lstrip().startswith("#"):
            # A comment between continued words or inside an array.
            continue
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        held += line
        if _open(held):
            held += "\n"
            continue
        if held.strip():
            yield held.strip()
        held = ""
    if held.strip():
        if _open(held):
            raise InputError(f"{file or 'the script'}: a quotation or an array never closes: {held.strip()[:60]}...")
        yield held.strip()


def _open(line: str) -> bool:
    """Whether quotes or an array's parenthesis are still open."""
    quote, depth, index = "", 0, 0
    array = bool(re.match(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?[A-Za-z_]\w*\+?=\(", line))
    while index < len(line):
        char = line[index]
        if char == "\\" and quote != "'":
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or line[index - 1] in " \t\n("):
            end = line.find("\n", index)
            index = len(line) if end < 0 else end
        elif array and char == "(":
            depth += 1
        elif array and char == ")":
            depth -= 1
        index += 1
    return bool(quote) or depth > 0


def _line(line: str, script: Script) -> None:
    first = line.split(None, 1)[0].rstrip(";") if line.split() else ""
    if first in _CONTROL:
        script.branches = script.branches or first in ("if", "case", "elif", "else")
        rest = re.sub(r"^(?:if|elif|while)\b.*?;\s*(?:then|do)\s*|^(?:then|else|do)\s+|;\s*(?:fi|done)\s*$", "", line)
        if rest == line or not rest.strip() or rest.split(None, 1)[0] in _CONTROL:
            return
        line = rest.strip()
    match = _ASSIGN.match(line)
    if match:
        _assign(match[1], match[2], match[3].strip(), script)
        return
    try:
        words = _words(line, script)
    except ValueError:
        return
    # Assignments in front of a command are its environment.
    while words and re.match(r"^[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        script.variables[name] = [value]
    if words:
        script.commands.append(words)


def _assign(name: str, operator: str, value: str, script: Script) -> None:
    array = value.startswith("(") and value.endswith(")")
    body = value[1:-1] if array else value
    if not array:
        # "A=1 B=2 command" assigns several; only what a single word holds belongs to this one.
        pieces = _split(body)
        if len(pieces) > 1 and re.match(r"^[A-Za-z_]\w*=", pieces[1]):
            _assign(name, operator, pieces[0], script)
            _line(" ".join(shlex.quote(p) if " " in p else p for p in pieces[1:]), script)
            return
        if len(pieces) > 1 and body[0] not in "\"'$" and not body.startswith("`"):
            script.variables[name] = _words(pieces[0], script)
            _line(" ".join(pieces[1:]), script)
            return
    try:
        words = _words(body, script)
    except ValueError:
        return
    found = words if array else [" ".join(words)]
    script.variables[name] = script.variables.get(name, []) + found if operator == "+=" and array else (
        [" ".join([*script.variables.get(name, []), *found])] if operator == "+=" else found
    )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return [text]


def _words(text: str, script: Script) -> list[str]:
    """Words of a command line after expansion; unset variables vanish, as in sh."""
    # Single quotes keep a dollar; a placeholder carries it through.
    text = re.sub(r"'([^']*)'", lambda m: "'" + m[1].replace("$", "\0") + "'", text)
    expanded = _expand(text, script)
    words = shlex.split(expanded, comments=True)
    return [w.replace("\0", "$") for w in words if w not in (";", "&&", "||", "&")]


def _expand(text: str, script: Script, depth: int = 0) -> str:
    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        value = script.variables.get(name)
        if match[2] in ("-", "=") and not (value and value != [""]):
            found = (match[3] or "").strip("\"'")
            if match[2] == "=":
                script.variables[name] = [found]
            return found
        if match[2] == "+":
            return (match[3] or "") if value and value != [""] else ""
        return " ".join(value) if value else ""

    def arithmetic(match: re.Match[str]) -> str:
        body = _VARIABLE.sub(variable, match[1])
        body = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(script.variables.get(m[0], ["0"])), body)
        if not _SAFE.match(body):
            return "0"
        try:
            # Digits, operators and parentheses only.
            return str(int(eval(body.replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ZeroDivisionError, TypeError, ValueError):
            return "0"

    text = _ARITHMETIC.sub(arithmetic, text)
    text = _COMMAND.sub("", text)
    found = _VARIABLE.sub(variable, text)
    return _expand(found, script, depth + 1) if found != text and "$" in found and depth < 8 else found


def options(words: list[str]) -> dict[str, list[str]]:
    """Flag -> its values: "--a 1 --b --c x y", "--a=1"; dashes and underscores are the same."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return found


__all__ = ["Script", "options", "read_script"]
