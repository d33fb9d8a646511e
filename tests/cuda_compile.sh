#!/usr/bin/env bash
# Compiles the CUDA backend where no GPU is needed: every kernel for each architecture, and the host files beside them.
# usage: tests/cuda_compile.sh ARCH..., e.g. tests/cuda_compile.sh 90a. Closes with 'N passed, N failed'.
# nvcc comes from $CUDACXX, PATH or /usr/local/cuda, else from PyPI (versions: deploy/dependencies.txt) into .cuda.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: tests/cuda_compile.sh ARCH..., e.g. tests/cuda_compile.sh 90a" >&2; exit 2; }

nvcc=${CUDACXX:-$(command -v nvcc || true)}
[ -n "$nvcc" ] || [ ! -x /usr/local/cuda/bin/nvcc ] || nvcc=/usr/local/cuda/bin/nvcc
if [ -z "$nvcc" ]; then
  wheels=$(awk '$1 == "cuda" { printf "%s==%s ", $2, $3 }' deploy/dependencies.txt)
  if [ "$(cat .cuda/installed 2>/dev/null)" != "$wheels" ]; then
    echo "no CUDA toolkit here; bringing $wheels"
    rm -rf .cuda
    python3 -m venv .cuda
    # shellcheck disable=SC2086  # wheels are words
    .cuda/bin/pip install -q $wheels || { echo "error: PyPI does not give the CUDA compiler, and no toolkit is installed" >&2; exit 1; }
    echo "$wheels" >.cuda/installed
  fi
  nvcc=$(echo .cuda/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
fi
include=$(dirname "$(dirname "$nvcc")")/include
launcher=$(command -v ccache || true)
mkdir -p build/cuda_compile

compile() {  # ARCH FILE
  local out
  out=build/cuda_compile/$(basename "$2").$1.o
  if [ "$1" = host ]; then
    $launcher g++ -std=c++20 -O1 -Wall -Wextra -I. -isystem "$include" -c "$2" -o "$out"
  else
    $launcher "$nvcc" -std=c++20 --expt-relaxed-constexpr -I. -gencode "arch=compute_$1,code=sm_$1" -c "$2" -o "$out"
  fi || { echo "error: $2 does not compile for $1"; return 1; }
  echo "compiled $2 for $1"
}
export -f compile
export nvcc include launcher
jobs=()
for file in kernels/cuda/*.cpp; do jobs+=("host $file"); done
for arch in "$@"; do
  for file in kernels/cuda/*.cu; do jobs+=("$arch $file"); done
done
log=$(printf '%s\n' "${jobs[@]}" | xargs -P "$(nproc)" -L 1 bash -c 'compile "$0" "$1"' 2>&1) || true
echo "$log"
passed=$(grep -c '^compiled ' <<<"$log" || true)
printf '%s passed, %s failed\n' "$passed" "$((${#jobs[@]} - passed))"
[ "$passed" = ${#jobs[@]} ]
