"""The .proto files are the contract: documented, and the generated code is what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_tools import protoc  # type: ignore[import-untyped]

from tidelog.model.errors import ErrorCode
from tidelog.rpc.api_docs import page
from tidelog.rpc.grpc.errors import STATUS_NAMES, as_exception, coded
from tidelog.rpc.grpc.methods import METHODS
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, common_pb2, groups_pb2, log_pb2, transactions_pb2

ROOT = Path(__file__).resolve().parents[3]
FILES = [module.DESCRIPTOR for module in (log_pb2, groups_pb2, transactions_pb2, cluster_pb2, admin_pb2, common_pb2)]
PROTOS = sorted((ROOT / "rpc" / "v1").glob("*.proto"))


def test_the_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    arguments = [
        "protoc",
        f"-I{ROOT / 'src'}",
        f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
        f"--python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}",
        *(str(ROOT / "src" / "tidelog" / "rpc" / "v1" / proto.name) for proto in PROTOS),
    ]
    assert protoc.main(arguments) == 0
    made = sorted((tmp_path / "tidelog" / "rpc" / "v1").iterdir())
    assert len(made) == 2 * len(PROTOS) == 12
    for file in made:
        committed = ROOT / "rpc" / "v1" / file.name
        assert committed.read_text() == file.read_text(), f"{file.name} is not up to date: make proto"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: str(proto.stem))
def test_every_proto_says_what_it_is_and_keeps_the_house_style(proto: Path) -> None:
    text = proto.read_text()
    assert text.startswith("// tidelog.v1"), "the file says what it holds"
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "package tidelog.v1;" in text


def test_fields_are_numbered_without_gaps_and_enums_begin_with_their_default() -> None:
    """A gap would be a field that was taken away, which is never done."""
    pool = descriptor_pool.Default()
    for proto in PROTOS:
        file = descriptor_pb2.FileDescriptorProto()
        pool.FindFileByName(f"tidelog/rpc/v1/{proto.name}").CopyToProto(file)
        messages = list(file.message_type)
        for message in messages:
            messages += message.nested_type
            numbers = sorted(field.number for field in message.field)
            assert numbers == list(range(1, len(numbers) + 1)), message.name
        for enum in (*file.enum_type, *(enum for message in messages for enum in message.enum_type)):
            assert enum.value[0].number == 0, enum.name


def test_the_reference_is_that_of_the_protos_and_says_something_of_every_call() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == page(), "run: python -m tidelog.rpc.api_docs > docs/api.md"
    for method in METHODS.values():
        described = page().partition(f"### {method.service}.{method.name}\n")[2].partition("###")[0]
        assert len(described.split()) > 8, f"{method.full_name} says nothing of itself"
    names = {name for file in FILES for name in (*file.message_types_by_name, *file.enum_types_by_name)}
    assert all(f"#### {name}\n" in page() for name in names)
    for file in FILES:
        for message in file.message_types_by_name.values():
            shown = page().partition(f"#### {message.name}\n")[2].partition("###")[0]
            assert all(f"| `{field.name}` |" in shown for field in message.fields), message.name
    assert all(f"| {code.name} | {code.value.code} |" in page() for code in ErrorCode)


def test_every_error_of_the_catalogue_has_a_code_of_its_own_and_survives_the_way() -> None:
    codes = [code.value.code for code in ErrorCode]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    assert set(STATUS_NAMES) <= set(ErrorCode)
    for code in ErrorCode:
        message = coded(code, "what is wrong")
        assert (message.code, message.name, message.retriable) == (code.value.code, code.name, code.value.retriable)
        assert message.advice == code.value.advice
        assert (as_exception(message).code, str(as_exception(message))) == (code, "what is wrong")
    message.name = "OF_A_LATER_VERSION"
    assert as_exception(message).code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert "OF_A_LATER_VERSION" in str(as_exception(message))
