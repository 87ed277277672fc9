"""A value that no `repr`, format, pickle or dump shows. Pure. `secret_references` finds them."""

from __future__ import annotations

import hmac
from typing import Never

HIDDEN = "(hidden)"


class Secret:
    """A text that only `reveal` returns."""

    __slots__ = ("__text",)

    def __init__(self, text: str) -> None:
        self.__text = text

    def reveal(self) -> str:
        return self.__text

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, _spec: str) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        """In a time that does not depend on where the two differ."""
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_encoded(self.__text), _encoded(other.__text))

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _memo: object) -> Secret:
        return self

    def __reduce_ex__(self, _protocol: object) -> Never:
        raise TypeError("a secret cannot be pickled")

    def __getstate__(self) -> Never:
        raise TypeError("a secret has no state to read")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
