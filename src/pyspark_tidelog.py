"""Spark imports every module named `pyspark_*` when it looks for a Python format, and registers its `DefaultSource`.

An error in here would break every other Python format, too: so there is none.
"""

try:
    from tidelog.spark.data_source import TidelogDataSource as DefaultSource
except Exception as error:
    _reason = f"{type(error).__name__}: {error}"
    try:
        from pyspark.sql.datasource import DataSource
    except Exception:
        pass  # a Spark before 4.0: it does not look here either
    else:

        class DefaultSource(DataSource):  # type: ignore[no-redef]
            """Tells why there is no format "tidelog", to those who ask for it only."""

            def __init__(self, options: dict[str, str]) -> None:
                raise RuntimeError(f"the format 'tidelog' cannot be loaded here: {_reason}")

            @classmethod
            def name(cls) -> str:
                return "tidelog"
