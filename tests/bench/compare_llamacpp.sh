#!/usr/bin/env bash
# Loupe beside llama.cpp on the same file, with the same threads, interleaved in one run; prints both sides and the
# ratio. llama.cpp is built from the source that PyPI's llama-cpp-python carries, or given as a folder of binaries.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/../.."
. deploy/lib.sh

usage() {
  cat <<'HELP'
usage: tests/bench/compare_llamacpp.sh [--llama-bin DIR] [--threads N] [--repeat N] [--model PATH] [--rows LIST]

  --llama-bin DIR   folder with llama-bench, -batched-bench, -server, -quantize; without it they are built (10 minutes on 2 cores)
  --rows LIST       only these rows, e.g. prefill:512,decode:2048,batch:8@128 (see compare_llamacpp.py)
HELP
}
llama_bin="" threads=2 repeat=5 model=$MODEL_FILE rows=()
while [ $# -gt 0 ]; do
  case $1 in
    --llama-bin | --threads | --repeat | --model | --rows)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; usage >&2; exit 2; }
      case $1 in
        --llama-bin) llama_bin=$(cd "$caller" && realpath -m "$2") ;;
        --threads) threads=$2 ;;
        --repeat) repeat=$2 ;;
        --model) model=$(cd "$caller" && realpath -m "$2") ;;
        --rows) rows=(--rows "$2") ;;
      esac
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "error: unknown flag '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

build_llama() {
  local dir=build/llamacpp version=0.3.36
  python3 -m venv $dir/venv
  $dir/venv/bin/pip install -q scikit-build-core
  $dir/venv/bin/pip download --no-binary llama-cpp-python --no-deps --no-build-isolation llama-cpp-python==$version -d $dir
  tar xzf $dir/llama_cpp_python-$version.tar.gz -C $dir
  cmake -S $dir/llama_cpp_python-$version/vendor/llama.cpp -B $dir/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DGGML_OPENMP=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF
  ninja -C $dir/build llama-bench llama-batched-bench llama-server llama-quantize
}
[ -x build/release/loupe ] || { echo "error: build/release/loupe is missing: cmake --preset release && cmake --build --preset release" >&2; exit 2; }
compare() { python3 tests/bench/compare_llamacpp.py --threads "$threads" --repeat "$repeat" --model "$model" "${rows[@]}" "$@"; }
compare --llama-bin "" --check
if [ -z "$llama_bin" ]; then
  llama_bin=build/llamacpp/build/bin
  [ -x $llama_bin/llama-bench ] || step "building llama.cpp" "See the log; or give binaries with --llama-bin." build_llama
fi
compare --llama-bin "$llama_bin"
