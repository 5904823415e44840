"""The native library and the readers of model files under the address and the undefined-behaviour sanitizer.

    python -m benchmarks.sanitize [--variants baseline avx2 avx512vnni avx512] [--tests ...]      (`make sanitize`)

Builds each variant that this processor runs with -fsanitize=address,undefined into build/sanitize, beside a copy of the
package's Python files, and runs the tests of kernels, lookups and hostile files against that copy. The first report of
a sanitizer ends the run. Leaks are not looked for: Python keeps memory until it ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT
from paceline.native.library import runnable_variants

BUILD = ROOT / "build" / "sanitize"
SOURCE = ROOT / "src" / "paceline"
ISA = {
    "avx512vnni": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c",
    "avx2": "-mavx2 -mfma -mf16c",
    "baseline": "",
}
FLAGS = "-O1 -g1 -w -std=c++17 -ffp-contract=off -fvisibility=hidden -fno-exceptions -fno-rtti -pthread -fPIC -shared"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
TESTS = ("tests/models/test_kernels.py", "tests/drafters/lookup", "tests/attack/test_files_safetensors.py")


def build(variants: list[str]) -> Path:
    """Return the folder of a copy of the package whose only libraries are those with sanitizers."""
    copy = BUILD / "src" / "paceline"
    shutil.rmtree(BUILD / "src", ignore_errors=True)
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    compiler = os.environ.get("CXX", "g++")
    for variant in variants:
        library = BUILD / f"kernels_{variant}.so"
        sources = [SOURCE / "native" / "kernels.cpp", *(SOURCE / "native").glob("*.h")]
        if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
            print(f"building {library.name}", flush=True)
            flags = [*FLAGS.split(), *SANITIZE.split(), *ISA[variant].split()]
            include = ["-include", str(SOURCE / "native" / "glibc.h")]
            subprocess.run([compiler, *flags, *include, str(sources[0]), "-o", str(library)], check=True)
        shutil.copy(library, copy / "native")
    return BUILD / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = runnable_variants()
    parser.add_argument("--variants", nargs="+", choices=runs, default=list(runs))
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args()
    package = build(options.variants)
    compiler = os.environ.get("CXX", "g++")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "PYTHONPATH": str(package),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:use_sigaltstack=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
    }
    check = "import paceline, sys; sys.exit(not paceline.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", check, str(package)], env=environment, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *options.tests]
    sys.exit(subprocess.run(command, env=environment, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
