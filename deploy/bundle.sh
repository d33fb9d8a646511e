#!/usr/bin/env bash
# Packs programs with the shared libraries that they need, for a machine that has a GPU and little else:
#   deploy/bundle.sh DIR PROGRAM...
# makes DIR/NAME (a starter), DIR/bin/NAME and DIR/lib. glibc, the driver and cuBLAS stay the other machine's own.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: deploy/bundle.sh DIR PROGRAM..., e.g. deploy/bundle.sh /tmp/loupe build/cuda/loupe" >&2; exit 2; }
dir=$1
shift
mkdir -p "$dir/bin" "$dir/lib"
for program in "$@"; do
  [ -x "$program" ] || { echo "error: no such program: $program; build it first" >&2; exit 2; }
  name=$(basename "$program")
  cp "$program" "$dir/bin/$name"
  strip "$dir/bin/$name"
  [ ! -d "$(dirname "$program")/artifacts" ] || cp -rL "$(dirname "$program")/artifacts" "$dir/bin/"
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | grep -vE '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*)\.so' |
    while read -r library; do cp -Lu "$library" "$dir/lib/"; done
  cat >"$dir/$name" <<'STARTER'
#!/bin/sh
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$here/bin/$(basename -- "$0")" "$@"
STARTER
  chmod +x "$dir/$name"
done
du -sh "$dir" | awk '{ print "bundled: " $1 " in " $2 }'
