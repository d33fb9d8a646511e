"""What the comparing scripts share: rows and files are checked before anything is measured, failures are one clear line."""
import pathlib
import re
import subprocess


def check_rows(parser, rows, kinds):
    """`kinds`: what may follow each kind: "" nothing, "N" a number, "N@N" sequences at a depth."""
    patterns = {"": r"", "N": r":[0-9]+", "N@N": r":[0-9]+@[0-9]+"}
    for row in rows.split(","):
        kind = row.partition(":")[0]
        if kind not in kinds or not re.fullmatch(re.escape(kind) + patterns[kinds[kind]], row):
            shapes = ", ".join(k + (":" + v if v else "") for k, v in kinds.items())
            parser.error(f"row '{row}' is none of {shapes}")


def check_files(parser, *paths):
    for path in paths:
        if not pathlib.Path(path).is_file():
            parser.error(f"no such file: {path}")


def output(command):
    command = [str(c) for c in command]
    r = subprocess.run(command, capture_output=True, text=True)
    if r.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {r.returncode}:\n{r.stderr[-2000:]}")
    return r.stdout
