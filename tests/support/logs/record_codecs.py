"""The ways in which records are encoded and decoded, so that every test of batches can run over all of them.

`compiled` is there only where the kernel was compiled; `source` is the same file, interpreted; `bulk` is what runs
where there is no compiled kernel.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tidelog.log import batch, kernel, kernel_bulk


def load_source() -> ModuleType:
    """log/kernel.py as an interpreted module, even if it is compiled."""
    path = Path(kernel_bulk.__file__).with_name("kernel.py")
    spec = importlib.util.spec_from_file_location("kernel_source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = load_source()
assert not SOURCE.COMPILED
assert SOURCE.__file__ is not None
assert SOURCE.__file__.endswith(".py")


@dataclass(frozen=True)
class Form:
    name: str
    encode: Callable[..., bytearray]
    decode: Callable[..., Any]

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make `tidelog.log.batch` use this form."""
        patch.setattr(batch, "encode_records", self.encode)
        patch.setattr(batch, "decode_records", self.decode)


FORMS = [
    *([Form("compiled", kernel.encode_loop, kernel.decode_loop)] if kernel.COMPILED else []),
    Form("source", SOURCE.encode_loop, SOURCE.decode_loop),
    Form("bulk", kernel_bulk.encode_bulk, kernel_bulk.decode_bulk),
]
KERNELS: list[Any] = [*([kernel] if kernel.COMPILED else []), SOURCE]
