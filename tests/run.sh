#!/usr/bin/env bash
# Builds and runs every test; what CI calls. Closes with 'N passed, N failed'. See docs/testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

usage() {
  cat <<'HELP'
usage: tests/run.sh [--quick | --full] [--filter REGEX] [--list]

  (nothing)        lint; the CUDA kernels for sm_90a, compiled only; release build with all tests and the end-to-end tests; clang
                   ASan+UBSan with the same tests and 10 s of each fuzzer; TSan on queues, pools and the engine with a scripted model
  --quick          lint and the release tests only (under 3 minutes after a build)
  --full           also the CUDA kernels for sm_80, 89 and 100, end-to-end under ASan, 10 minutes of schemathesis and of each
                   fuzzer of what strangers send, 120 s of the others, and the quality and speed figures
  --filter REGEX   only suites whose name matches, e.g. --filter 'lint|release/kernels'
  --list           print the names of the suites (of the binaries built so far) and stop

Packages, the Python clients (.venv) and the default model are brought if they are missing.
HELP
}

mode=default filter=. list=false
while [ $# -gt 0 ]; do
  case $1 in
    --quick) mode=quick ;;
    --full) mode=full ;;
    --list) list=true ;;
    --filter)
      [ $# -ge 2 ] || { echo "error: --filter needs a regular expression" >&2; exit 2; }
      filter=$2
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "error: unknown flag '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

passed=0 failed=0 failures=()
wanted() { [[ $1 =~ $filter ]]; }

# suite NAME COMMAND...: runs one suite, counts its tests by what its runner prints (gtest, pytest, or 'N passed, N failed').
suite() {
  local name=$1 start=$SECONDS log rc=0 ok bad
  shift
  wanted "$name" || return 0
  if $list; then echo "$name"; return 0; fi
  mkdir -p "$LOG_DIR"
  log=$LOG_DIR/$(printf '%s' "$name" | tr -c 'A-Za-z0-9' '_').log
  printf '%-58s' "$name ..."
  "$@" >"$log" 2>&1 </dev/null || rc=$?
  ok=$(grep -oE '(\[  PASSED  \] [0-9]+ test|[0-9]+ passed)' "$log" | grep -oE '[0-9]+' | tail -1 || true)
  bad=$(grep -oE '(\[  FAILED  \] [0-9]+ test|[0-9]+ (failed|error))' "$log" | grep -oE '[0-9]+' | tail -1 || true)
  ok=${ok:-0} bad=${bad:-0}
  if [ $rc -ne 0 ] && [ "$bad" = 0 ]; then bad=1; fi
  if [ $rc -eq 0 ] && [ "$ok" = 0 ] && [ "$bad" = 0 ]; then bad=1; echo "the suite ran no test" >>"$log"; fi
  passed=$((passed + ok)) failed=$((failed + bad))
  if [ "$bad" -gt 0 ]; then
    failures+=("$name")
    printf '%s passed, %s FAILED (exit %s, %ss)\n' "$ok" "$bad" "$rc" "$((SECONDS - start))"
    grep -nE '(^\[  FAILED|Failure$|: error|^E  |^FAILED|ERROR: |runtime error|WARNING: ThreadSanitizer|check failed)' "$log" | head -30 | sed 's/^/  | /' || true
    printf '  ... the last lines of %s:\n' "$log"
    tail -30 "$log" | sed 's/^/  | /'
  else
    printf '%s passed (%ss)\n' "$ok" "$((SECONDS - start))"
  fi
}

run_fuzzer() {  # BINARY SECONDS
  local name corpus
  name=$(basename "$1")
  corpus=build/corpus/$name
  mkdir -p "$corpus"
  local seeds=()
  [ -d "tests/fuzz/corpus/$name" ] && seeds=("tests/fuzz/corpus/$name")
  "$1" -max_total_time="$2" -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="build/logs/$name-" "$corpus" "${seeds[@]}" && echo "1 passed"
}

tests_of() { find "build/$1" -maxdepth 1 -type f -executable -name '*_test' 2>/dev/null | sort; }
python_clients() {
  [ "$(cat .venv/installed 2>/dev/null)" = "$(sha256sum tests/requirements.txt)" ] && return 0
  rm -rf .venv
  python3 -m venv .venv
  .venv/bin/pip install -q -r tests/requirements.txt
  sha256sum tests/requirements.txt >.venv/installed
}
build() {  # PRESET 'TARGETS' CMAKE-FLAGS...
  local preset=$1 targets=$2
  shift 2
  step "$preset: configuring" "A missing package belongs into deploy/dependencies.txt." cmake --preset "$preset" "$@"
  # shellcheck disable=SC2086  # targets are words
  step "$preset: building" "Fix what the compiler says, then run this again." cmake --build --preset "$preset" --target $targets
}
summary() {
  if [ ${#failures[@]} -gt 0 ]; then
    printf '\nfailed: %s\nAgain, only these: tests/run.sh --filter %q\n' "${failures[*]}" "$(IFS='|'; echo "${failures[*]}")"
  fi
  printf '\n%s passed, %s failed\n' "$passed" "$failed"
  [ "$failed" = 0 ]
}
stop_if_failed() { [ "$failed" = 0 ] || { summary; exit 1; }; }

# Thread sanitizer runs what links no gRPC: its reports there are false (docs/testing.md).
tsan_tests='thread_pool_test engine_unit_test engine_test sim_test'

[ $mode != full ] || export LOUPE_TEST_FULL=1  # longer end-to-end tests

if ! $list; then
  install_packages build model test
  step "Python clients (.venv)" "PyPI must be reachable; the versions are in tests/requirements.txt." python_clients
  fetch_model
fi
suite lint python3 tests/lint/lint.py
stop_if_failed
if [ $mode != quick ]; then
  archs=90a
  [ $mode = full ] && archs='90a 80 89 100'
  # shellcheck disable=SC2086  # architectures are words
  suite "cuda/compile" tests/cuda_compile.sh $archs
  stop_if_failed
fi

if [[ $filter = . ]] || ! [[ $filter =~ ^(asan|tsan|fuzz|lint|cuda) ]]; then
  $list || build release all -DWITH_TESTS=ON
  for t in $(tests_of release); do suite "release/$(basename "$t")" "$t" --gtest_brief=1; done
  suite e2e .venv/bin/python -m pytest -q -x --timeout=300 tests/e2e
  stop_if_failed
fi

if [ $mode != quick ]; then
  if [[ $filter = . ]] || [[ $filter =~ (asan|fuzz) ]]; then
    $list || build asan all
    for t in $(tests_of asan); do suite "asan/$(basename "$t")" "$t" --gtest_brief=1; done
    if [ $mode = full ]; then
      suite asan/e2e env LOUPE_TEST_BINARY=build/asan/loupe .venv/bin/python -m pytest -q -x --timeout=900 tests/e2e
    fi
    for f in $(find build/asan -maxdepth 1 -type f -executable -name '*_fuzz' 2>/dev/null | sort); do
      seconds=10
      if [ $mode = full ]; then
        case $f in */grpc_message_fuzz | */http_json_fuzz | */template_fuzz | */regex_fuzz | */schema_fuzz | */answer_parser_fuzz) seconds=600 ;; *) seconds=120 ;; esac
      fi
      suite "fuzz/$(basename "$f")" run_fuzzer "$f" $seconds
    done
    stop_if_failed
  fi
  if [[ $filter = . ]] || [[ $filter =~ tsan ]]; then
    $list || build tsan "$tsan_tests"
    for t in $tsan_tests; do suite "tsan/$t" "build/tsan/$t" --gtest_brief=1; done
  fi
fi
if [ $mode = full ]; then
  suite figures tests/bench/figures.sh
fi
$list && exit 0
summary
