"""`TypedConsumer`: how a consumer is created. Its type parameters are what the deserializers return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Generic, Unpack, overload

from tidelog.client.consumer.frontend import ConsumerFrontend
from tidelog.client.option_table import ConsumerConfig, read_options
from tidelog.client.options import Bootstrap, ConsumerOptions, DeserializerLike, PlainConsumerOptions
from tidelog.client.record import K, V


class TypedConsumer(Generic[K, V]):
    _bootstrap: Bootstrap = None
    """The default."""
    _frontend: ConsumerFrontend

    @overload
    def __init__(
        self: TypedConsumer[bytes | None, bytes | None],
        bootstrap: Bootstrap = None,
        /,
        **options: Unpack[PlainConsumerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TypedConsumer[K, bytes | None],
        bootstrap: Bootstrap = None,
        /,
        *,
        key_deserializer: Callable[[bytes], K] | DeserializerLike[K],
        **options: Unpack[PlainConsumerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TypedConsumer[bytes | None, V],
        bootstrap: Bootstrap = None,
        /,
        *,
        value_deserializer: Callable[[bytes], V] | DeserializerLike[V],
        **options: Unpack[PlainConsumerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TypedConsumer[K, V],
        bootstrap: Bootstrap = None,
        /,
        *,
        key_deserializer: Callable[[bytes], K] | DeserializerLike[K],
        value_deserializer: Callable[[bytes], V] | DeserializerLike[V],
        **options: Unpack[PlainConsumerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TypedConsumer[Any, Any], bootstrap: Bootstrap = None, /, **options: Unpack[ConsumerOptions]
    ) -> None: ...

    def __init__(self, bootstrap: Bootstrap = None, /, **options: Any) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Does not connect yet."""
        config = read_options(ConsumerConfig, self._bootstrap if bootstrap is None else bootstrap, options)
        self.options = config if config.client_id else replace(config, client_id=f"tidelog-consumer-{next(_numbers)}")
        self._start()

    def _start(self) -> None:
        """Creates the state of the client."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return counters since the start, and gauges; `records_lag.<partition>` as of the last fetch. Thread-safe."""
        return self._frontend.metrics()


_numbers = count(1)
