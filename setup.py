"""Compiles the kernel modules when Cython and a C compiler are at hand; everything else is in pyproject.toml.

`TIDELOG_PURE=1` builds without them: the same sources are then interpreted.
"""

import os

from setuptools import Extension, setup

KERNELS = ("tidelog.log.kernel", "tidelog.client.producer.fast_path")


def extensions() -> list[Extension]:
    if os.environ.get("TIDELOG_PURE"):
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    # optional=True: a failed compilation is a warning, and the package is built without the extension.
    kernels = [
        Extension(name, [f"src/{name.replace('.', '/')}.py"], optional=True, extra_compile_args=["-O3", "-fwrapv"])
        for name in KERNELS
    ]
    return list(cythonize(kernels, build_dir="build/cython", language_level=3, quiet=True))


setup(ext_modules=extensions())
