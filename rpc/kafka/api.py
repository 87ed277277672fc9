"""An API of Kafka's protocol: its two messages, their versions, encoders and decoders."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Generic, TypeVar, cast

from tidelog.rpc.kafka.decoder import Decode, decoder
from tidelog.rpc.kafka.encoder import Encode, EncodeRows, encoder, rows_encoder
from tidelog.rpc.kafka.schema import HEADINGS
from tidelog.rpc.kafka.wire import (
    ELEMENTS_MAX,
    NUMBERS_MAX,
    RESPONSE_ELEMENTS_MAX,
    RESPONSE_NUMBERS_MAX,
    Buffer,
    MalformedError,
    UnencodableError,
)

Request = TypeVar("Request")
Response = TypeVar("Response")


class Api(Generic[Request, Response]):
    """One API key. Encoders and decoders are compiled when a version is first used."""

    __slots__ = (
        "_request_decoders",
        "_request_encoders",
        "_response_decoders",
        "_response_encoders",
        "_rows_encoders",
        "_sliced_decoders",
        "_sliced_encoders",
        "flexible_since",
        "high",
        "key",
        "low",
        "name",
        "request",
        "response",
    )

    def __init__(self, request: type[Request], response: type[Response]) -> None:
        heading = HEADINGS[request]
        assert HEADINGS[response] is heading, f"{response.__name__} answers another request"
        self.key = heading.key
        self.name = request.__name__.removesuffix("Request")
        self.request = request
        self.response = response
        self.low = heading.low
        self.high = heading.high
        self.flexible_since = heading.flexible_since
        self._request_decoders: dict[int, Decode] = {}
        self._request_encoders: dict[int, Encode] = {}
        self._response_decoders: dict[int, Decode] = {}
        self._response_encoders: dict[int, Encode] = {}
        self._rows_encoders: dict[tuple[int, type], EncodeRows] = {}
        self._sliced_decoders: dict[int, Decode] = {}
        self._sliced_encoders: dict[int, Encode] = {}

    def __repr__(self) -> str:
        return f"Api({self.key} {self.name} v{self.low}-{self.high})"

    def serves(self, version: int) -> bool:
        return self.low <= version <= self.high

    def flexible(self, version: int) -> bool:
        return version >= self.flexible_since

    def decode_request(self, version: int, data: Buffer, offset: int = 0) -> Request:
        decode = self._request_decoders.get(version) or self._decoder(self.request, self._request_decoders, version)
        message: Request = decode(data, offset)
        return message

    def decode_response(self, version: int, data: Buffer, offset: int = 0) -> Response:
        decode = self._response_decoders.get(version) or self._decoder(self.response, self._response_decoders, version)
        message: Response = decode(data, offset)
        return message

    def encode_request(self, version: int, request: Request) -> list[Buffer]:
        encode = self._request_encoders.get(version) or self._encoder(self.request, self._request_encoders, version)
        return encode(request)

    def encode_response(self, version: int, response: Response) -> list[Buffer]:
        """Returns consecutive buffers; large record batches are their own buffers."""
        encode = self._response_encoders.get(version) or self._encoder(self.response, self._response_encoders, version)
        return encode(response)

    def encode_rows(self, version: int, cls: type, rows: Sequence[object]) -> bytes:
        """Structs of a `large` array of the response, for `EncodedRows`."""
        encode = self._rows_encoders.get((version, cls))
        if encode is None:
            encode = self._rows_encoders[version, cls] = rows_encoder(cls, version, flexible=self.flexible(version))
        return encode(rows)

    def decode_in_slices(
        self, version: int, data: Buffer, offset: int = 0
    ) -> Generator[None, None, tuple[Request, int]]:
        """Decodes a request in slices; returns the message and roughly the bytes of its objects."""
        decode = self._sliced_decoders.get(version)
        if decode is None:
            self._check(version, MalformedError)
            decode = self._sliced_decoders[version] = decoder(
                self.request, version, elements_max=ELEMENTS_MAX, numbers_max=NUMBERS_MAX, is_sliced=True
            )
        work: Generator[None, None, tuple[Request, int]] = decode(data, offset)
        return work

    def encode_in_slices(self, version: int, response: Response) -> Generator[None, None, list[Buffer]]:
        """As `encode_response`, in slices."""
        encode = self._sliced_encoders.get(version)
        if encode is None:
            self._check(version, UnencodableError)
            encode = self._sliced_encoders[version] = encoder(self.response, version, is_sliced=True)
        return cast("Generator[None, None, list[Buffer]]", encode(response))

    def _check(self, version: int, error: type[Exception]) -> None:
        if not self.serves(version):
            raise error(f"{self.name} v{version} is not served: {self.low} to {self.high}")

    def _decoder(self, cls: type, made: dict[int, Decode], version: int) -> Decode:
        self._check(version, MalformedError)
        is_request = cls is self.request
        made[version] = decoder(
            cls,
            version,
            elements_max=ELEMENTS_MAX if is_request else RESPONSE_ELEMENTS_MAX,
            numbers_max=NUMBERS_MAX if is_request else RESPONSE_NUMBERS_MAX,
        )
        return made[version]

    def _encoder(self, cls: type, made: dict[int, Encode], version: int) -> Encode:
        self._check(version, UnencodableError)
        made[version] = encoder(cls, version)
        return made[version]
