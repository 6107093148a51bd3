"""Build the compiled kernel. Everything else about the package stands in pyproject.toml.

`optional=True`: on a machine without a compiler the build goes on without it, and
router_replay.kernel uses NumPy, which gives the same bytes.
"""

from setuptools import Extension, setup

kernel = Extension(
    "router_replay.kernel._compiled",
    sources=["src/router_replay/kernel/_compiled.c"],
    depends=[f"src/router_replay/kernel/{part}.h" for part in ("lanes", "check", "ranks")],
    extra_compile_args=["-O3", "-std=gnu11", "-Wno-psabi"],  # vectors are only passed within the file
    py_limited_api=True,  # one build for Python 3.11 and every later version
    optional=True,
)

setup(ext_modules=[kernel], options={"bdist_wheel": {"py_limited_api": "cp311"}})
