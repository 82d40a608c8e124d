"""Turns a request's structured output into one Lark grammar of llguidance, or refuses it.

llguidance limits the cost of a grammar, but not that of a single step with a few constructs; those
are counted here. `structured.py` runs the grammar.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NoReturn

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from twinphase.constraint import StructuredOutputsParams, plain_json
from twinphase.errors import InvalidRequestError

# The model chooses the tokens of forced text, as with other text. Forcing tokens would tokenize the
# whole forced text in every step.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Enough to indent nested JSON; without a bound, a small model may indent forever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"

# Conversion time grows with the square of the rules.
MAX_GBNF_RULES = 300
# Each pattern that one text must match doubles the work of a step.
MAX_COMBINED_PATTERNS = 10
# A test for divisibility needs this many states.
MAX_COMMON_MULTIPLE = 10_000
# Time and memory of a step grow with the square of a regular expression: at worst 60 ms and 12 MB
# for this many bytes.
MAX_REGEX_BYTES = 4096
# Time of a step grows with the square of an object's properties.
MAX_PROPERTIES = 1000
# llguidance recurses from rule to rule. About three times as many rules overflow a stack of 8 MB,
# which ends the process.
MAX_RULES = 1000
MAX_REFS = 500
# At the lowest 64-bit integer the recursion of llguidance does not end.
LOWEST_NUMBER = -9e18

_ANNOTATIONS = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
}
_COMBINING = ("$ref", "anyOf", "oneOf")
# An unterminated string or regex matches too, so that no text is searched twice.
_LARK_TOKEN = re.compile(
    r'(?P<string>"(?:\\.|[^"\\\n])*(?:"|(?P<no_end>)))|//[^\n]*'
    r"|(?P<regex>/(?:\\.|[^/\\])*(?:/|(?P<open>)))"
    r"|#[^\n]*|(?P<schema>%json\b\s*)|(?P<and>&)"
)
_LARK_RULE = re.compile(r"(?m)^[ \t]*[?!]*(\w[^\n:]*):")
_LARK_TERMINAL = re.compile(r"\b_*[A-Z]\w*")
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")


def to_lark(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a constraint; equal constraints have equal grammars.

    `special_tokens` maps the text of each control token to its id.

    Raises:
        InvalidRequestError: the constraint is not supported or costs too much.
    """
    try:
        return _to_lark(params, special_tokens)
    except InvalidRequestError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        _refuse(
            params.kind, f"cannot be used: {' '.join(str(error).split())[:200]}.", "Correct it."
        )


def _to_lark(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    if params.regex is not None:
        # Character classes are ASCII, as in JSON Schema: \d means 0 to 9.
        regex = regex_to_lark(params.regex, "dws")
        _check_size("regex", "a regular expression", regex)
        body = f"start: /{regex}/\n"
    elif params.choice is not None:
        body = "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, params.choice)) + "\n"
    elif params.grammar is not None:
        body = _from_gbnf(params.grammar) if _GBNF_RULE.search(params.grammar) else params.grammar
        _check_lark(body)
    elif params.structural_tag is not None:
        body = _structural_tag(params, special_tokens)
    else:
        schema = (
            {"type": "object"}
            if params.json is None
            else plain_json("structured_outputs.json", params.json)
        )
        body = f"start: {_schema(schema, params)}\n"
    return f"{body}\n{_OPTIONS}"  # Last, to keep line numbers in messages.


def _schema(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    if "x-guidance" in schema:
        _refuse(
            params.kind,
            "has the key x-guidance.",
            "Use whitespace_pattern or disable_any_whitespace.",
        )
    _check_schema(params.kind, schema)
    _check_size(params.kind, "a whitespace_pattern", params.whitespace_pattern or "")
    options: dict[str, object] = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _structural_tag(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """Free text up to a trigger, then a structure that begins with the trigger, repeatedly.

    The lexeme with the trigger is lazy: free text cannot contain a trigger.
    """
    tag = plain_json("structured_outputs.structural_tag", params.structural_tag or "")
    structures = tag.get("structures") or []
    triggers = tag.get("triggers") or []
    if tag.get("type") != "structural_tag" or not _all(dict, structures) or not _all(str, triggers):
        _refuse(
            params.kind,
            "is not of the form that is supported.",
            'Give {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], '
            '"triggers": [...]}.',
        )
    rules = []
    for number, structure in enumerate(structures):
        begin, schema, end = (structure.get(name) for name in ("begin", "schema", "end"))
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            _refuse(
                params.kind,
                f"has structure {number} without begin, schema or end.",
                "Give all three.",
            )
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            _refuse(
                params.kind, f"has no trigger that {begin!r} begins with.", "Add one to triggers."
            )
        if trigger in special_tokens:
            head = f"TEXT <[{special_tokens[trigger]}]>"
        else:
            head = f"head_{number}"
            rules.append(f"{head}[lazy]: TEXT {_literal(trigger)}")
        after = _texts(begin.removeprefix(trigger), special_tokens)
        rules.append(
            f"tag_{number}: {head} {after} {_schema(schema, params)} {_texts(end, special_tokens)}"
        )
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules, ""])


def _all(kind: type, values: object) -> bool:
    """Whether `values` is a non-empty list of that kind."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, kind) for value in values)
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(text: str, special_tokens: Mapping[str, int]) -> str:
    """Literals for a text; names of control tokens become those tokens."""
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in names else _literal(part) for part in parts if part
    )


def _from_gbnf(text: str) -> str:
    if text.count("::=") > MAX_GBNF_RULES:
        _refuse("grammar", f"has more than {MAX_GBNF_RULES} rules in GBNF.", "Use fewer, or Lark.")
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_gbnf_character, text))
    except Exception as error:  # The converter raises bare exceptions.
        _refuse(
            "grammar",
            f"is not GBNF: {' '.join(str(error).split())[:200]}.",
            "It needs a rule named root.",
        )


def _gbnf_character(match: re.Match[str]) -> str:
    r"""Decodes \uXXXX, whose zeros the converter drops: the character, or \xXX for syntax."""
    digits = match[1] or match[2]
    code = int(digits, 16) if digits else -1
    if not 0 <= code <= sys.maxunicode or 0xD800 <= code < 0xE000:
        return match[0]
    return chr(code) if code >= 0x80 or chr(code).isalnum() else f"\\x{code:02x}"


def _check_lark(text: str) -> None:
    """Refuse constructs outside of strings and comments that llguidance does not limit."""
    outline = []  # The grammar without schemas and comments; each string is one character.
    at = 0
    while found := _LARK_TOKEN.search(text, at):
        outline.append(text[at : found.start()])
        at = found.end()
        if found["no_end"] is not None or found["open"] is not None:
            _refuse(
                "grammar",
                f"has no end for {found[0][:40]!r}.",
                "Write the closing character on the same line.",
            )
        if found["and"]:
            _refuse("grammar", "uses the operator &.", "Write the terminal without it.")
        if found["string"]:
            outline.append('"')
        if found["regex"]:
            _check_size("grammar", "a regular expression", found[0][1:-1])
            outline.append("/" * len(found[0].encode("utf-8", "replace")))
        if found["schema"]:
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                _refuse("grammar", f"has a %json that is not JSON: {error}.", "Correct it.")
            if isinstance(schema, dict):
                _check_schema("grammar", plain_json("structured_outputs.grammar", schema))
    _check_terminals("".join([*outline, text[at:]]))


def _check_terminals(outline: str) -> None:
    """Refuse too many rules, and terminals whose regex is too large with others expanded."""
    heads = list(_LARK_RULE.finditer(outline))
    if len(heads) > MAX_RULES:
        _refuse("grammar", f"has more than {MAX_RULES} rules.", "Use fewer.")
    bodies: dict[str, str] = {}
    ends = [head.start() for head in heads[1:]] + [len(outline)]
    for head, end in zip(heads, ends, strict=True):
        # Attributes make a rule a terminal.
        name = head[1].strip() if "[" in head[1] else head[1].split(".")[0].strip()
        bodies[name] = bodies.get(name, "") + outline[head.end() : end]
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in sizes:
            sizes[name] = 1  # Ends recursion in a cycle, which llguidance refuses.
            inner = [
                inner for inner in _LARK_TERMINAL.findall(bodies.get(name, "")) if inner in bodies
            ]
            own = len("".join(bodies[name].split())) - sum(map(len, inner))
            sizes[name] = own + sum(map(size, inner))
        return sizes[name]

    for name in bodies:
        if ("[" in name or _LARK_TERMINAL.match(name)) and size(name) > MAX_REGEX_BYTES:
            _refuse(
                "grammar",
                f"has the terminal {name[:40]}, which is too large.",
                "Make rules of its parts.",
            )


def _check_size(kind: str, what: str, regex: str) -> None:
    if len(regex.encode("utf-8", "replace")) > MAX_REGEX_BYTES:
        _refuse(
            kind,
            f"has {what} of more than {MAX_REGEX_BYTES} bytes: {regex[:40]!r}...",
            "Use a shorter one.",
        )


def _check_schema(kind: str, schema: dict[str, Any]) -> None:
    """Refuse combined patterns, large common multiples, and schemas that crash llguidance."""
    patterns: set[str] = set()
    targets: set[str] = set()
    multiples: set[Fraction] = set()
    combines = False
    nodes: list[object] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        if isinstance(node, (int, float)) and node < LOWEST_NUMBER:
            _refuse(kind, f"has the number {node}.", f"Use none below {LOWEST_NUMBER:g}.")
        if not isinstance(node, dict):
            continue
        nodes += node.values()
        texts = {value for key in ("pattern", "format") if isinstance(value := node.get(key), str)}
        if isinstance(named := node.get("patternProperties"), dict):
            texts |= named.keys()
        patterns |= texts
        if isinstance(blank := node.get("whitespace_pattern"), str):
            texts.add(blank)
        for text in texts:
            _check_size(kind, "a pattern", text)
        if isinstance(named := node.get("properties"), dict) and len(named) > MAX_PROPERTIES:
            _refuse(
                kind, f"has an object of {len(named)} properties.", f"Use {MAX_PROPERTIES} at most."
            )
        if isinstance(target := node.get("$ref"), str):
            targets.add(target)
        if isinstance(value := node.get("multipleOf"), bool):
            _refuse(kind, f"has {json.dumps(value)} for multipleOf.", "Use a number.")
        if isinstance(value, (int, float)) and value:
            multiples.add(abs(Fraction(repr(value))))
        parts = node.get("allOf")
        others = any(
            key not in _ANNOTATIONS and key not in _COMBINING and key != "allOf" for key in node
        )
        combined = sum(key in node for key in _COMBINING) + (
            len(parts) if isinstance(parts, list) else 0
        )
        combines |= combined > 0 and combined + others > 1
    if len(targets) > MAX_REFS:
        _refuse(kind, f"refers to {len(targets)} subschemas.", f"Use {MAX_REFS} at most.")
    if combines and len(patterns) > MAX_COMBINED_PATTERNS:
        _refuse(
            kind,
            f"combines subschemas and has {len(patterns)} different patterns and formats.",
            "Use fewer.",
        )
    if multiples and _common_multiple(multiples) > MAX_COMMON_MULTIPLE:
        _refuse(
            kind,
            "has values of multipleOf whose common multiple is too large.",
            "Use rounder ones.",
        )


def _common_multiple(values: Iterable[Fraction]) -> int:
    """The least common multiple in units of the finest fraction; stops above the limit."""
    first, *others = values
    unit = first.denominator
    multiple = first.numerator
    for value in others:
        finer = math.lcm(unit, value.denominator)
        multiple = math.lcm(multiple * (finer // unit), int(value * finer))
        unit = finer
        if multiple > MAX_COMMON_MULTIPLE:
            break
    return multiple


def _refuse(kind: str, what: str, fix: str) -> NoReturn:
    raise InvalidRequestError(f"structured_outputs.{kind} {what}", fix)
