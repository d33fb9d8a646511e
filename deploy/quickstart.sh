#!/usr/bin/env bash
# From a fresh Debian 12 machine to a first answer: installs packages, builds build/release/loupe, brings the default
# model, serves it, asks one question over HTTP and prints the answer with its usage.kv. Run it as often as you like.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

usage() {
  cat <<'HELP'
usage: deploy/quickstart.sh [--once] [--model PATH] [--http HOST:PORT] [--device auto|cpu|cuda] [--build-only]

  --once             answer one question, drain, exit 0 (also without a terminal)
  --model PATH       a GGUF file in place of the default model
  --http HOST:PORT   where to serve (127.0.0.1:8000)
  --device DEVICE    auto, cpu or cuda; auto takes a GPU if one and the CUDA compiler are there
  --build-only       stop after the build

example: ./deploy/quickstart.sh --once
HELP
}

model="" http=127.0.0.1:8000 device=auto once=false build_only=false
while [ $# -gt 0 ]; do
  case $1 in
    --once) once=true ;;
    --build-only) build_only=true ;;
    --model | --http | --device)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; usage >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "error: unknown flag '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ -t 0 ] && [ -t 1 ] || once=true
case $device in
  auto | cpu) ;;
  cuda) [ -x "${CUDACXX:-/usr/local/cuda/bin/nvcc}" ] || command -v nvcc >/dev/null || die "--device cuda needs the CUDA 13 compiler (nvcc); install the toolkit, or use --device cpu" ;;
  *) echo "error: unknown device '$device' (auto, cpu, cuda)" >&2; exit 2 ;;
esac

install_packages build model
# CUDA is compiled in only if it is asked for, or if a GPU and the compiler are there.
preset=release
if [ "$device" = cuda ] || { [ "$device" = auto ] && command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 && [ -x "${CUDACXX:-/usr/local/cuda/bin/nvcc}" ]; }; then
  preset=cuda
fi
step "configuring" "Read the log above; a missing package belongs into deploy/dependencies.txt." cmake --preset $preset
step "building build/$preset/loupe" "Fix what the compiler says, then run this again: it goes on where it stopped." \
  cmake --build --preset $preset --target loupe
$build_only && exit 0
if [ -z "$model" ]; then
  fetch_model
  model=$MODEL_FILE
fi
[ -e "$model" ] || { echo "error: no such model file: $model" >&2; exit 2; }

mkdir -p "$LOG_DIR"
build/$preset/loupe serve --model "$model" --http "$http" --device "$device" 2>"$LOG_DIR/serve.log" &
server=$!
stop() { kill -TERM "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; }
trap stop EXIT
printf '%-58s' "serving on http://$http ..."
start=$SECONDS
until curl -sf "http://$http/health" >/dev/null 2>&1; do
  if ! kill -0 "$server" 2>/dev/null || [ $((SECONDS - start)) -gt 120 ]; then
    echo "FAILED"
    tail -5 "$LOG_DIR/serve.log" | sed 's/^/  | /'
    echo "  If the address is taken, choose another with --http HOST:PORT (and LOUPE_GRPC, LOUPE_MANAGEMENT)."
    exit 1
  fi
  sleep 0.1
done
echo "ready"

question='What is a loupe? Answer in one sentence.'
printf '\nPOST http://%s/v1/chat/completions\n> %s\n' "$http" "$question"
reply=$(curl -sS --fail-with-body "http://$http/v1/chat/completions" -H 'Content-Type: application/json' \
  -d "{\"messages\":[{\"role\":\"user\",\"content\":\"$question\"}],\"max_tokens\":64,\"temperature\":0}") \
  || { echo "$reply"; exit 1; }
python3 - "$reply" <<'PY'
import json, sys
reply = json.loads(sys.argv[1])
print('<', reply['choices'][0]['message']['content'].strip())
print('usage.kv:', json.dumps(reply['usage']['kv']))
PY

if $once; then
  trap - EXIT
  kill -TERM "$server"
  wait "$server"
  printf '\ndrained, exit 0\n'
else
  printf '\nServing until Ctrl-C. Log: %s. Try:\n  curl http://%s/v1/models\n' "$LOG_DIR/serve.log" "$http"
  trap 'stop; exit 0' INT TERM
  wait "$server"
fi
