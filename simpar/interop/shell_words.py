"""Words of sh and bash: tokens of a script, and what a word expands to (quotes, variables, arrays, arithmetic)."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simpar.errors import InputError

Variables = dict[str, list[str]]
OPERATORS: Final = ("&&", "||", ";;", ";", "|&", "|", "&", "\n")
_REDIRECT: Final = re.compile(r"(?:\d*|&)(?:>>|>&|>\||<<<|<>|>|<)(?:&?\d+)?-?")
_NAME: Final = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=$")


@dataclass(frozen=True, slots=True)
class Token:
    """A word as written, quotes and all, or an operator; `line` counts from 1."""

    text: str
    line: int
    is_operator: bool = False


def tokens(text: str, file: str = "") -> list[Token]:
    """Tokens of a script: comments, redirections and here-documents are left out.

    Raises:
        InputError: a quotation or a parenthesis that never closes.
    """
    text = text.replace("\r\n", "\n")
    found: list[Token] = []
    at, line = 0, 1
    pending: list[str] = []
    while at < len(text):
        c = text[at]
        if c == "\n":
            found.append(Token("\n", line, True))
            at, line = at + 1, line + 1
            for word in pending:
                at, line = _after_heredoc(text, at, line, word)
            pending = []
        elif c in " \t":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif c == "#":
            at = _end_of_line(text, at)
        elif heredoc := re.compile(r"\d*<<-?\s*(['\"]?)(\w+)\1").match(text, at):
            pending.append(heredoc[2])
            at = heredoc.end()
        elif (redirect := _REDIRECT.match(text, at)) and redirect[0]:
            at = redirect.end()
            if not re.search(r"\d$|-$", redirect[0][1:] or "") or redirect[0][-1] in "<>":
                while at < len(text) and text[at] in " \t":
                    at += 1
                at = _end_of_word(text, at, line, file)
        elif (op := next((o for o in OPERATORS if text.startswith(o, at)), None)) is not None:
            found.append(Token(op, line, True))
            at += len(op)
        elif c in "()":
            found.append(Token(c, line, True))
            at += 1
        else:
            end = _end_of_word(text, at, line, file)
            found.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
    return found


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _after_heredoc(text: str, at: int, line: int, end: str) -> tuple[int, int]:
    while at < len(text):
        stop = _end_of_line(text, at)
        content = text[at:stop].strip()
        at, line = stop + 1, line + 1
        if content == end:
            break
    return min(at, len(text)), line


def _end_of_word(text: str, at: int, line: int, file: str) -> int:
    """Index after the word that starts at `at`: up to white space or an operator outside quotes and parentheses."""
    start = at
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 2
        elif c in "'\"`" or text.startswith(("$(", "${"), at) or (c == "(" and _ARRAY.search(text[start:at])):
            at = _close(text, at, line, file)
        elif c in " \t\n;|&()<>":
            break
        else:
            at += 1
    return max(min(at, len(text)), start + 1)


def _close(text: str, at: int, line: int, file: str) -> int:
    """Index after what closes the quotation or bracket that opens at `at`."""
    opening = text[at]
    if opening == "'":
        end = text.find("'", at + 1)
    elif opening == "`":
        end = text.find("`", at + 1)
    elif opening == '"':
        end = _double_quote(text, at + 1, line, file)
    else:
        end = _bracket(text, at + (opening == "$"), line, file)
    if end < 0:
        where = f"{file or 'the script'}:{line}"
        raise InputError(f"{where}: {text[at : at + 40]!r}: expected a closing {opening!r}")
    return end + 1


def _double_quote(text: str, at: int, line: int, file: str) -> int:
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at
        elif text.startswith(("$(", "${"), at) or text[at] == "`":
            at = _close(text, at, line, file)
        else:
            at += 1
    return -1


def _bracket(text: str, at: int, line: int, file: str) -> int:
    opening = text[at]
    closing = {"(": ")", "{": "}"}[opening]
    at += 1
    while at < len(text):
        c = text[at]
        if c == closing:
            return at
        if c == "\\":
            at += 2
        elif c == "#" and text[at - 1] in " \t\n(":
            at = _end_of_line(text, at)
        elif c in "'\"`" or c == opening or text.startswith(("$(", "${"), at):
            at = _close(text, at, line, file)
        else:
            at += 1
    return -1


# -- expansion -----------------------------------------------------------------------------------------------------------


@dataclass
class Expander:
    """Expands words against `variables`; `unset` collects names without a value, `command` answers $(...)."""

    variables: Variables
    command: Callable[[str], str] = lambda _: ""
    unset: set[str] = field(default_factory=set)

    def words(self, raw: str) -> list[str]:
        """Fields of one word."""
        parts: list[tuple[str, bool]] = []
        fields: list[list[tuple[str, bool]]] = [parts]

        def put(text: str, quoted: bool) -> None:
            fields[-1].append((text, quoted))

        at = 0
        while at < len(raw):
            c = raw[at]
            if c == "\\":
                if raw[at + 1 : at + 2] != "\n":
                    put(raw[at + 1 : at + 2], True)
                at += 2
            elif c == "'":
                end = raw.index("'", at + 1)
                put(raw[at + 1 : end], True)
                at = end + 1
            elif c == '"':
                end = _double_quote(raw, at + 1, 0, "")
                self._quoted(raw[at + 1 : end], fields)
                at = end + 1
            elif c in "$`":
                values, at = self._value(raw, at)
                for index, value in enumerate(" ".join(values).split()):
                    if index or (values and values[0][:1].isspace()):
                        fields.append([])
                    put(value, False)
                if values and values[-1][-1:].isspace():
                    fields.append([])
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\'\"$`":
                    end += 1
                put(raw[at:end], False)
                at = end
        return ["".join(text for text, _ in one) for one in fields if one and (any(q for _, q in one) or any(t for t, _ in one))]

    def text(self, raw: str) -> str:
        """One word without splitting, as on the right of an assignment."""
        return " ".join(self.words(f'"{raw}"')) if not re.search(r"[\"'\\]", raw) else self._unsplit(raw)

    def _unsplit(self, raw: str) -> str:
        found, at = "", 0
        while at < len(raw):
            c = raw[at]
            if c == "\\":
                found, at = found + raw[at + 1 : at + 2].replace("\n", ""), at + 2
            elif c == "'":
                end = raw.index("'", at + 1)
                found, at = found + raw[at + 1 : end], end + 1
            elif c == '"':
                end = _double_quote(raw, at + 1, 0, "")
                inner: list[list[tuple[str, bool]]] = [[]]
                self._quoted(raw[at + 1 : end], inner)
                found, at = found + " ".join("".join(t for t, _ in one) for one in inner), end + 1
            elif c in "$`":
                values, at = self._value(raw, at)
                found += " ".join(values)
            else:
                found, at = found + c, at + 1
        return found

    def _quoted(self, raw: str, fields: list[list[tuple[str, bool]]]) -> None:
        fields[-1].append(("", True))
        at = 0
        while at < len(raw):
            c = raw[at]
            if c == "\\" and raw[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                fields[-1].append((raw[at + 1].replace("\n", ""), True))
                at += 2
            elif c in "$`":
                separate = bool(re.match(r"\$(?:@|\{(?:[A-Za-z_]\w*\[@\]|@)\})", raw[at:]))
                values, at = self._value(raw, at)
                if not separate:
                    fields[-1].append((" ".join(values), True))
                    continue
                if not values and fields[-1] == [("", True)]:
                    fields[-1] = []
                for index, value in enumerate(values):
                    if index:
                        fields.append([])
                    fields[-1].append((value, True))
            else:
                fields[-1].append((c, True))
                at += 1

    def _value(self, raw: str, at: int) -> tuple[list[str], int]:
        """Values of the expansion that starts at `at`, and the index after it."""
        if raw[at] == "`":
            end = raw.find("`", at + 1)
            return [self.command(raw[at + 1 : end])], end + 1
        if raw.startswith("$((", at):
            end = _bracket(raw, at + 1, 0, "")
            return [str(self.arithmetic(raw[at + 3 : end - 1]))], end + 1
        if raw.startswith("$(", at):
            end = _bracket(raw, at + 1, 0, "")
            return [self.command(raw[at + 2 : end])], end + 1
        if raw.startswith("${", at):
            end = _bracket(raw, at + 1, 0, "")
            return self._parameter(raw[at + 2 : end]), end + 1
        match = _NAME.match(raw, at + 1)
        if match is None:
            return ["$"], at + 1
        return self._get(match[0]), match.end()

    def _get(self, name: str) -> list[str]:
        if name == "#":
            return [str(len(self.variables.get("@", [])))]
        if name in self.variables:
            return self.variables[name] if name in ("@", "*") else self.variables[name][:1]
        if name not in ("@", "*", "?", "$", "!", "-") and not name.isdigit():
            self.unset.add(name)
        return ["0"] if name == "?" else []

    def _parameter(self, body: str) -> list[str]:
        if match := re.fullmatch(r"#([A-Za-z_]\w*)(\[[@*]\])?", body):
            values = self.variables.get(match[1], [])
            return [str(len(values) if match[2] else len(" ".join(values)))]
        match = re.match(r"(!?)([A-Za-z_]\w*|\d+|[@*#?])(?:\[([^\]]*)\])?", body)
        if match is None:
            return []
        name, index, rest = match[2], match[3], body[match.end() :]
        if match[1]:
            name = " ".join(self._get(name))
        known = name in self.variables
        values = self.variables.get(name, [])
        if index is not None and index not in "@*":
            place = self.arithmetic(index)
            values = values[place : place + 1] if place >= 0 else []
        elif index is None and not name.isdigit() and name not in "@*":
            values = values[:1]
        if not rest:
            return values if known else self._get(name)
        return self._operated(name, values, known, rest)

    def _operated(self, name: str, values: list[str], known: bool, rest: str) -> list[str]:
        text = " ".join(values)
        if match := re.match(r"(:?)([-=+?])(.*)", rest, re.S):
            present = bool(text) if match[1] else known
            if match[2] == "+":
                return [self.text(match[3])] if present else []
            if present:
                return values
            found = self.text(match[3]) if match[2] != "?" else ""
            if match[2] == "=":
                self.variables[name] = [found]
            return [found]
        if match := re.match(r"(##?|%%?)(.*)", rest, re.S):
            return [_trimmed(text, match[1], self.text(match[2]))]
        if match := re.match(r"//?([^/]*)(?:/(.*))?", rest, re.S):
            return [text.replace(self.text(match[1]), self.text(match[2] or ""), -1 if rest.startswith("//") else 1)]
        if rest in (",", ",,", "^", "^^"):
            return [text.lower() if "," in rest else text.upper()]
        if match := re.match(r":(\d+)(?::(\d+))?$", rest):
            start = int(match[1])
            return [text[start : start + int(match[2])] if match[2] else text[start:]]
        return values

    def arithmetic(self, body: str) -> int:
        """The value of $((body)); what is no number counts 0, as in sh."""
        text = self._unsplit(body.replace('"', ""))
        text = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(self.variables.get(m[0], ["0"])) or "0", text)
        return evaluate(text)


def _trimmed(text: str, how: str, pattern: str) -> str:
    front, longest = how[0] == "#", len(how) == 2
    cuts = range(len(text) + 1) if front != longest else range(len(text), -1, -1)
    for cut in cuts:
        part, rest = (text[:cut], text[cut:]) if front else (text[cut:], text[:cut])
        if fnmatch.fnmatchcase(part, pattern):
            return rest
    return text


_BINARY: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b), ast.LShift: lambda a, b: a << min(b, 64), ast.RShift: operator.rshift,
    ast.Pow: lambda a, b: a ** min(b, 64),
}  # fmt: skip
_COMPARE: Final[dict[type[ast.cmpop], Callable[[int, int], bool]]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def evaluate(text: str) -> int:
    """Integer arithmetic of sh: + - * / % ** shifts, comparisons, && || !, a ? b : c."""
    match = re.fullmatch(r"\s*\(?([^?]*?)\)?\s*\?([^:]*):(.*?)\)?\s*", text, re.S)
    if match:
        condition = match[1] if match[1].count("(") == match[1].count(")") else f"({match[1]})"
        return evaluate(match[2]) if evaluate(condition) else evaluate(match[3])
    python = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).strip()
    try:
        return _number(ast.parse(python or "0", mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return 0


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return int(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp):
        value = _number(node.operand)
        return {ast.USub: -value, ast.UAdd: value, ast.Not: int(not value), ast.Invert: ~value}[type(node.op)]
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(v)) for v in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        return int(_COMPARE[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    raise ValueError("no arithmetic of sh")


__all__ = ["Expander", "Token", "Variables", "evaluate", "tokens"]
