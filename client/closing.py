"""`with` and `async with`: leaving the block closes the client."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Protocol, Self, runtime_checkable


@runtime_checkable
class ClosingProtocol(Protocol):
    def close(self, timeout: float | None = None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class AsyncClosingProtocol(Protocol):
    def close(self, timeout: float | None = None) -> Awaitable[None]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing:
    def close(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    async def close(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
