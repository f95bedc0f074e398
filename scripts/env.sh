# Sourced by the other scripts: makes .venv from the pinned requirements (only when they changed) and sets $PYTHON.
# The package is importable from any folder once .venv is active.
#
# HSTU_ENV=cpu|gpu picks the requirement set (default: the one .venv has, else cpu); HSTU_PYTHON names the interpreter
# that makes .venv.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"

die() {
  echo "error: $*" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in "${HSTU_PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    [ -z "${HSTU_PYTHON:-}" ] || die "HSTU_PYTHON=$HSTU_PYTHON is not a Python 3.11 or newer: name another interpreter"
  done
  die "no Python 3.11 or newer found (looked for python3, python3.13, python3.12, python3.11): install one, or set HSTU_PYTHON"
}

requirements_hash() {
  cat "$REPO"/requirements/*.txt | { cat; echo "$HSTU_ENV"; } | cksum | tr ' ' '-'
}

made_for() {
  cat "$VENV/.requirement_set" 2>/dev/null || echo "$1"
}

make_env() {
  local want python
  want="$(requirements_hash)"
  [ "$(cat "$VENV/.requirements" 2>/dev/null)" = "$want" ] && return
  # Made anew: a .venv whose interpreter has gone (an upgraded system Python), and one of the other set, since the two
  # builds of FBGEMM share a folder.
  if ! "$VENV/bin/python" -c '' 2>/dev/null || [ "$(made_for "$HSTU_ENV")" != "$HSTU_ENV" ]; then
    python="$(find_python)" || exit 2
    echo "making $VENV with $("$python" --version), requirements/$HSTU_ENV.txt ..." >&2
    "$python" -m venv --clear "$VENV" || die "$python -m venv failed: install its venv module (python3-venv on Debian)"
  else
    echo "updating $VENV to requirements/$HSTU_ENV.txt ..." >&2
  fi
  rm -f "$VENV/.requirements"
  echo "$HSTU_ENV" >"$VENV/.requirement_set"
  local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" -r "$REPO/requirements/$HSTU_ENV.txt" >&2 || die "installing requirements/$HSTU_ENV.txt failed: see pip's message above"
  "${pip[@]}" --no-deps -r "$REPO/requirements/no-deps-$HSTU_ENV.txt" >&2 ||
    die "installing requirements/no-deps-$HSTU_ENV.txt failed: see pip's message above"
  echo "$want" >"$VENV/.requirements"
}

link_package() {
  # A path file instead of an install: it needs no build, and follows a repository that was moved. The scripts do not
  # depend on it (they set PYTHONPATH), so an environment that cannot be written is no reason to stop.
  local packages
  for packages in "$VENV"/lib/python3.*/site-packages; do
    [ "$(cat "$packages/generative_recommenders.pth" 2>/dev/null)" = "$REPO" ] && continue
    { echo "$REPO" >"$packages/generative_recommenders.pth"; } 2>/dev/null ||
      echo "warning: $packages cannot be written: outside $REPO, set PYTHONPATH=$REPO to import the package" >&2
  done
}

HSTU_ENV="${HSTU_ENV:-$(made_for cpu)}"
[ -f "$REPO/requirements/$HSTU_ENV.txt" ] || die "HSTU_ENV=$HSTU_ENV: expected cpu or gpu"

# Two scripts started at once must not install into one environment together.
if command -v flock >/dev/null; then
  exec 9>"$REPO/.venv.lock"
  flock 9
  make_env
  link_package
  exec 9>&-
else
  make_env
  link_package
fi

PYTHON="$VENV/bin/python"
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
