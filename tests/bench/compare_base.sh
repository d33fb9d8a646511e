#!/usr/bin/env bash
# This checkout beside an earlier commit, both sides in turn on the same machine: a change that made something slower shows
# as a ratio below 1. The earlier commit is built in a worktree below build/.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/../.."
. deploy/lib.sh

usage() {
  cat <<'HELP'
usage: tests/bench/compare_base.sh [--base REV] [--threads N] [--repeat N] [--rows LIST] [--model PATH]

  --base REV     what to compare with (HEAD~1)
  --repeat N     runs of each side; the medians count (7)
  --rows LIST    prefill:TOKENS, decode:DEPTH, batch:SEQUENCES@DEPTH
                 (prefill:512,decode:0,decode:2048,batch:8@128)
HELP
}
base=HEAD~1 threads=2 repeat=7 rows=prefill:512,decode:0,decode:2048,batch:8@128 model=$MODEL_FILE
while [ $# -gt 0 ]; do
  case $1 in
    --base | --threads | --repeat | --rows | --model)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; usage >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "error: unknown flag '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ "$model" = "$MODEL_FILE" ] || model=$(cd "$caller" && realpath -m "$model")
compare() { python3 tests/bench/compare_base.py --threads "$threads" --repeat "$repeat" --rows "$rows" --model "$model" "$@"; }
compare --base "" --check
commit=$(git rev-parse --verify --quiet "$base^{commit}") || { echo "error: '$base' is no commit of this repository" >&2; exit 2; }

build_base() {
  [ -d build/base ] || git worktree add --detach build/base "$commit"
  git -C build/base checkout -q --detach "$commit"
  (cd build/base && CCACHE_BASEDIR=$PWD cmake --preset release && CCACHE_BASEDIR=$PWD cmake --build --preset release --target loupe)
}
step "building $base" "The log says why it does not build." build_base
step "building this checkout" "Fix what the compiler says." bash -c 'cmake --preset release && cmake --build --preset release --target loupe'

compare --base build/base/build/release/loupe --name "$base ($(git rev-parse --short "$commit"))"
