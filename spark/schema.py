"""The source's columns as Spark types, and checks of a user-supplied schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidelog.client.errors import OptionError
from tidelog.spark.options import COLUMNS, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def source_schema(options: SourceOptions) -> StructType:
    """Return all columns except headers, or those that the options name."""
    from pyspark.sql.types import StructField, StructType

    types = _types()
    names = options.columns or tuple(name for name in COLUMNS if name != "headers" or options.include_headers)
    return StructType([StructField(name, types[name], True) for name in names])


def _types() -> dict[str, Any]:
    from pyspark.sql import types

    pair = types.StructType(
        [types.StructField("key", types.StringType()), types.StructField("value", types.BinaryType())]
    )
    return {
        "key": types.BinaryType(),
        "value": types.BinaryType(),
        "topic": types.StringType(),
        "partition": types.IntegerType(),
        "offset": types.LongType(),
        "timestamp": types.TimestampType(),
        "timestampType": types.IntegerType(),
        "headers": types.ArrayType(pair),
    }


def check_schema(schema: StructType) -> None:
    """Raise OptionError, one line, for unknown columns or wrong types."""
    types = _types()
    for field in schema.fields:
        expected = types.get(field.name)
        if expected is None:
            raise OptionError(f"schema: there is no column '{field.name}'; there are {', '.join(COLUMNS)}")
        if _plain(field.dataType) != _plain(expected):
            raise OptionError(
                f"schema: column '{field.name}' is {expected.simpleString()}, not {field.dataType.simpleString()}; "
                "cast it in the query"
            )
    if not schema.fields:
        raise OptionError("schema: it has no column")


def _plain(kind: Any) -> str:
    """Return the type without its nullability flags."""
    return str(kind.simpleString())


def arrow_schema(schema: StructType) -> Any:
    """Return the Arrow schema that Spark expects, exactly."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
