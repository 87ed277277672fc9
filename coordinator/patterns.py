r"""Patterns of topic names, matched in time that grows with the name alone.

Python's `re` searches by trying and going back: a pattern of twenty characters can keep it busy for ever, and nothing
can interrupt it. Here a pattern becomes a machine of states that reads each character once (Thompson's construction;
sets of its states are remembered, up to `_REMEMBERED_MAX`). That gives what RE2 gives, and what Kafka takes, RE2's
syntax without what needs going back:

    pattern  branch | branch            quantifiers  * + ? {m} {m,} {,n} {m,n}, greedy or not: all the same here
    atoms    a \. . [a-z] [^a-z] ( ) (?: ) (?P<name> ) ^ $ \d \w \s \D \W \S \A \Z, and (?i) in front of all

A pattern must match the whole name. Refused (`InvalidPatternError`): look-around, references to groups, word bounds,
and patterns that take more than `NODES_MAX` nodes once their counted repetitions are written out.

Names of topics are of ASCII letters, digits, dot, underscore and hyphen, so a set of characters is an int of 128 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from tidelog.model.group_errors import InvalidPatternError

NODES_MAX = 1_000
DEPTH_MAX = 40
_REMEMBERED_MAX = 2_000
_UNBOUNDED = -1

_ALL = (1 << 128) - 1


def _mask(characters: Iterable[str]) -> int:
    mask = 0
    for each in characters:
        if ord(each) < 128:
            mask |= 1 << ord(each)
    return mask


_DIGIT = _mask("0123456789")
_WORD = _DIGIT | _mask("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = _mask(" \t\n\r\f\v")
_CLASSES = {"d": _DIGIT, "D": _ALL ^ _DIGIT, "w": _WORD, "W": _ALL ^ _WORD, "s": _SPACE, "S": _ALL ^ _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_DOT = _ALL ^ _mask("\n")


# ---- The parse tree


@dataclass(frozen=True, slots=True)
class _Chars:
    mask: int


@dataclass(frozen=True, slots=True)
class _Edge:
    """`^` or `$`."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Tree, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[_Tree, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    of: _Tree
    least: int
    most: int


_Tree = _Chars | _Edge | _Sequence | _Choice | _Repeat


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.ignores_case = text.startswith("(?i)")
        if self.ignores_case:
            self.position = 4

    def wrong(self, why: str) -> InvalidPatternError:
        return InvalidPatternError(f"pattern {self.text!r}, at character {self.position + 1}: {why}")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            raise self.wrong("it ends too early")
        self.position += 1
        return character

    def skip(self, wanted: str) -> bool:
        if not self.text.startswith(wanted, self.position):
            return False
        self.position += len(wanted)
        return True

    def parse(self) -> _Tree:
        tree = self.choice(0)
        if self.peek():
            raise self.wrong("a ) without its (")
        return tree

    def choice(self, depth: int) -> _Tree:
        if depth > DEPTH_MAX:
            raise self.wrong(f"groups stand more than {DEPTH_MAX} deep")
        branches = [self.sequence(depth)]
        while self.skip("|"):
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def sequence(self, depth: int) -> _Tree:
        parts: list[_Tree] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom(depth)))
        return _Sequence(tuple(parts))

    def repeated(self, atom: _Tree) -> _Tree:
        bounds = self.bounds()
        if bounds is None:
            return atom
        if isinstance(atom, _Edge):
            raise self.wrong("nothing to repeat")
        if not self.skip("?") and self.skip("+"):
            raise self.wrong("possessive quantifiers are not known here")
        if self.bounds() is not None:
            raise self.wrong("two quantifiers in a row")
        return _Repeat(atom, *bounds)

    def bounds(self) -> tuple[int, int] | None:
        for mark, bounds in (("*", (0, _UNBOUNDED)), ("+", (1, _UNBOUNDED)), ("?", (0, 1))):
            if self.skip(mark):
                return bounds
        if self.peek() != "{":
            return None
        inside, closing, _ = self.text[self.position + 1 :].partition("}")
        low, comma, high = inside.partition(",")
        # As in `re`, braces that hold no bounds are characters.
        if (
            not closing
            or not inside.strip(",")
            or not all(b == "" or (b.isascii() and b.isdigit()) for b in (low, high))
        ):
            return None
        if len(low) > 4 or len(high) > 4:
            raise self.wrong(f"repeated more than {NODES_MAX} times")
        self.position += len(inside) + 2
        least = int(low or 0)
        most = least if not comma else _UNBOUNDED if not high else int(high)
        if most != _UNBOUNDED and most < least:
            raise self.wrong("the least is more than the most")
        return least, most

    def atom(self, depth: int) -> _Tree:
        character = self.take()
        if character == "(":
            return self.group(depth)
        if character == "[":
            return _Chars(self.chars())
        if character == ".":
            return _Chars(_DOT)
        if character in "^$":
            return _Edge(character == "^")
        if character == "\\":
            if self.peek() in ("A", "Z"):
                return _Edge(self.take() == "A")
            return _Chars(self.escape())
        if character in "*+?":
            raise self.wrong("nothing to repeat")
        return _Chars(self.folded(_mask(character)))

    def group(self, depth: int) -> _Tree:
        if self.skip("?P<"):
            while (character := self.take()) != ">":
                if not (character.isalnum() or character == "_"):
                    raise self.wrong("a group's name is of letters and digits")
        elif not self.skip("?:") and self.peek() == "?":
            raise self.wrong("look-around, references and flags inside are not known here")
        tree = self.choice(depth + 1)
        if not self.skip(")"):
            raise self.wrong("a ( without its )")
        return tree

    def escape(self) -> int:
        character = self.take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return _mask(_CONTROLS[character])
        if character.isascii() and character.isalnum():
            raise self.wrong(f"\\{character} is not known here")
        return self.folded(_mask(character))

    def chars(self) -> int:
        negated = self.skip("^")
        mask = 0
        is_first = True
        while is_first or self.peek() != "]":
            is_first = False
            mask |= self.range()
        self.take()
        mask = self.folded(mask)
        return _ALL ^ mask if negated else mask

    def range(self) -> int:
        low = self.take()
        if low == "\\":
            mask = self.escape()
            if self.peek() != "-" or self.text[self.position + 1 : self.position + 2] in ("]", ""):
                return mask
            if mask.bit_count() != 1:
                raise self.wrong("a range begins with one character")
            low = chr(mask.bit_length() - 1)
        if self.peek() != "-" or self.text[self.position + 1 : self.position + 2] in ("]", ""):
            return _mask(low)
        self.take()
        high = self.take()
        if high == "\\":
            mask = self.escape()
            if mask.bit_count() != 1:
                raise self.wrong("a range ends with one character")
            high = chr(mask.bit_length() - 1)
        if high < low:
            raise self.wrong(f"the range {low}-{high} goes backwards")
        return _mask(chr(code) for code in range(ord(low), min(ord(high), 127) + 1))

    def folded(self, mask: int) -> int:
        if not self.ignores_case:
            return mask
        both = (chr(code) for code in range(128) if mask >> code & 1)
        return _mask(case for each in both for case in (each.lower(), each.upper()))


# ---- The machine


class _Machine:
    """Nodes: `masks[n]` is what a node reads (0: nothing), `outs[n]` where it leads; node 0 is the end of the match."""

    def __init__(self, pattern: str) -> None:
        self.masks = [0]
        self.outs: list[tuple[int, ...]] = [()]
        self.edges: dict[int, bool] = {}
        """Nodes that are passed only at the start (True) or the end (False) of the name."""
        self.pattern = pattern
        first = self.build(_Parser(pattern).parse(), 0)
        self.start = self.closure([first], at_start=True)
        self.moves: dict[frozenset[int], dict[str, frozenset[int]]] = {}
        self.accepts: dict[frozenset[int], bool] = {}

    def node(self, mask: int, outs: tuple[int, ...]) -> int:
        if len(self.masks) >= NODES_MAX:
            raise InvalidPatternError(f"pattern {self.pattern!r} takes more than {NODES_MAX} nodes: make it simpler")
        self.masks.append(mask)
        self.outs.append(outs)
        return len(self.masks) - 1

    def build(self, tree: _Tree, then: int) -> int:
        """The node where `tree` begins, if the match goes on at `then`."""
        if isinstance(tree, _Chars):
            return self.node(tree.mask, (then,))
        if isinstance(tree, _Edge):
            node = self.node(0, (then,))
            self.edges[node] = tree.is_start
            return node
        if isinstance(tree, _Sequence):
            for part in reversed(tree.parts):
                then = self.build(part, then)
            return then
        if isinstance(tree, _Choice):
            return self.node(0, tuple(self.build(branch, then) for branch in tree.branches))
        end = then
        if tree.most == _UNBOUNDED:
            then = self.node(0, ())
            self.outs[then] = (self.build(tree.of, then), end)
        else:
            for _ in range(tree.most - tree.least):
                then = self.node(0, (self.build(tree.of, then), end))
        for _ in range(tree.least):
            then = self.build(tree.of, then)
        return then

    def closure(self, nodes: Iterable[int], *, at_start: bool = False, at_end: bool = False) -> frozenset[int]:
        """The nodes that are reached without reading; those that read, the end, and `$` that waits for it."""
        seen: set[int] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            is_open = node not in self.edges or (at_start if self.edges[node] else at_end)
            if not self.masks[node] and is_open:
                waiting.extend(self.outs[node])
        return frozenset(node for node in seen if node == 0 or self.masks[node] or self.edges.get(node) is False)

    def matches(self, name: str) -> bool:
        if not name.isascii():
            return False
        state = self.start
        if not name:
            return 0 in self.closure(state, at_start=True, at_end=True)
        for character in name:
            moves = self.moves.get(state)
            following = None if moves is None else moves.get(character)
            if following is None:
                following = self.follow(state, character)
            if not following:
                return False
            state = following
        accepted = self.accepts.get(state)
        if accepted is None:
            accepted = self.accepts[state] = 0 in self.closure(state, at_end=True)
        return accepted

    def follow(self, state: frozenset[int], character: str) -> frozenset[int]:
        code = ord(character)
        following = self.closure(out for node in state if self.masks[node] >> code & 1 for out in self.outs[node])
        if len(self.moves) >= _REMEMBERED_MAX:
            self.moves.clear()
            self.accepts.clear()
        self.moves.setdefault(state, {})[character] = following
        return following


@lru_cache(maxsize=64)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Whether a whole name matches; `InvalidPatternError` if it is no pattern, or one that is not taken here."""
    return _Machine(pattern).matches
