"""The columns of the source as Spark's types, and a schema that the user gives in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidelog.client.errors import OptionError
from tidelog.spark.options import COLUMNS, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def source_schema(options: SourceOptions) -> StructType:
    """All columns but headers, or those that the options name."""
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
    """Raises OptionError, one line, for columns that are not the source's, or of other types."""
    types = _types()
    for field in schema.fields:
        wanted = types.get(field.name)
        if wanted is None:
            raise OptionError(f"schema: there is no column '{field.name}'; there are {', '.join(COLUMNS)}")
        if _plain(field.dataType) != _plain(wanted):
            raise OptionError(
                f"schema: column '{field.name}' is {wanted.simpleString()}, not {field.dataType.simpleString()}; "
                "cast it in the query"
            )
    if not schema.fields:
        raise OptionError("schema: it has no column")


def _plain(kind: Any) -> str:
    """The type without its flags of null."""
    return str(kind.simpleString())


def arrow_schema(schema: StructType) -> Any:
    """As Spark wants the batches, exactly."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
