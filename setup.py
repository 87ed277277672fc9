"""Compiles the kernel module when Cython and a C compiler are at hand; everything else is in pyproject.toml.

`TIDELOG_PURE=1` builds without it: the same source is then interpreted.
"""

import os

from setuptools import Extension, setup

KERNEL = "tidelog.log.kernel"


def extensions() -> list[Extension]:
    if os.environ.get("TIDELOG_PURE"):
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    # optional=True: a failed compilation is a warning, and the package is built without the extension.
    kernel = Extension(KERNEL, ["src/tidelog/log/kernel.py"], optional=True, extra_compile_args=["-O3", "-fwrapv"])
    return list(cythonize([kernel], build_dir="build/cython", language_level=3, quiet=True))


setup(ext_modules=extensions())
