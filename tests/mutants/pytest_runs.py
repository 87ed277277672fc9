"""In a worker: pytest, measured or run against the mutant that is installed.

Hypothesis draws the same examples in each run, keeps no database (a mutant's failures are not those of the product),
and does not shrink.
"""

import time
from collections.abc import Generator
from typing import Any

import pytest

from mutants.hook import Hits
from mutants.worker import Reply

PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin", "tidelog.testing.plugin")
OPTIONS = (
    *("-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--disable-plugin-autoload"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # pytest runs more than once in a process
    *(part for name in PLUGINS for part in ("-p", name)),
)
"""Plugins by name: pytest rewrites the assertions of packages whose plugins it finds itself, so it would import the
product with a hook of its own."""


class _Plugin:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings  # pytest rewrites its assertions, and has to import it first

        settings.register_profile(
            "mutants",
            settings.get_profile("ci"),
            database=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),
        )
        settings.load_profile("mutants")


class _Measures(_Plugin):
    def __init__(self, hits: Hits, reply: Reply) -> None:
        super().__init__(reply)
        self._hits = hits
        self._outcomes: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._outcomes = []
        self._hits.take()
        began = time.process_time()
        result = yield
        spent_s = time.process_time() - began
        self._reply(
            {
                "test": item.nodeid,
                "s": round(spent_s, 3),
                "holds": self._outcomes == ["passed"] * 3,
                "hits": {module: f"{mask:x}" for module, mask in self._hits.take().items()},
            }
        )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append(report.outcome)


class _Runs(_Plugin):
    def __init__(self, tests: list[str], reply: Reply) -> None:
        super().__init__(reply)
        self.has_failed = False
        self._order = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reply({"begins": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report)

    def _fail(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.has_failed = True
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = (report.longreprtext if crash is None else crash.message).splitlines()
        self._reply({"failed": report.nodeid, "why": (lines[0] if lines else "")[:300]})


def measure_tests(files: list[str], hits: Hits, reply: Reply) -> None:
    """For each test what it costs, whether it passes, and which blocks it reaches."""
    pytest.main([*OPTIONS, *files], plugins=[_Measures(hits, reply)])


def run_tests(stages: list[list[str]], timeout_s: int, reply: Reply) -> None:
    """In this order; stops at the first failure. Files of a later stage are not imported before it begins."""
    for tests in stages:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        plugin = _Runs(tests, reply)
        pytest.main([*OPTIONS, "-x", "-o", f"timeout={timeout_s}", *files], plugins=[plugin])
        if plugin.has_failed:
            return
