"""Builds the CPU kernels: one C++ file, one shared library per instruction set, loaded by path through ctypes.

Everything else about the package is in pyproject.toml. Without a C++ compiler the installation still succeeds and the
torch kernels serve.
"""

import glob
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

X86_64 = {
    "avx512vnni": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "baseline": [],
}
ELSEWHERE: dict[str, list[str]] = {"baseline": []}

HEADERS = sorted(glob.glob("src/paceline/native/*.h"))
FLAGS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-g0",
    "-pthread",
    "-include",
    "src/paceline/native/glibc.h",
]


def extensions() -> list[Extension]:
    if sys.platform == "win32":
        return []
    variants = X86_64 if platform.machine().lower() in ("x86_64", "amd64") else ELSEWHERE
    return [
        Extension(
            f"paceline.native.kernels_{variant}",
            sources=["src/paceline/native/kernels.cpp"],
            depends=HEADERS,
            extra_compile_args=FLAGS + isa,
            extra_link_args=["-pthread"],
            optional=True,
        )
        for variant, isa in variants.items()
    ]


class BuildLibraries(build_ext):
    """Plain shared libraries, whatever Python builds them."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        # All variants share a source: without a folder of their own their objects would overwrite each other.
        shared, self.build_temp = self.build_temp, f"{self.build_temp}/{ext.name}"
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPythonWheel})
