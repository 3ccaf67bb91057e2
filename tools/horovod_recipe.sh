#!/bin/sh
# An environment with Horovod for strategy=horovod: makes .venv-horovod with the tested versions, Horovod and this project.
#
#   PYTHON=python3                 Python 3.11 or newer, and a C++ compiler with C++20 (g++ 10, clang 10)
#   HOROVOD_VENV=.venv-horovod     where the environment goes
#   HOROVOD_WHEELS=build/horovod   where the built wheel is kept: the next time nothing is compiled
#   HOROVOD_OPTIMIZE=-O2           what the compiler is told; -O1 halves the minutes
#
# Horovod 0.28.1 asks for C++14 and torch's headers need C++20. So the compiler is called through a script that says
# C++20 instead; no line of Horovod is changed. It is built for CPUs, with gloo and without MPI.
set -eu

VERSION=0.28.1
PYTHON=${PYTHON:-python3}
VENV=${HOROVOD_VENV:-.venv-horovod}
OPTIMIZE=${HOROVOD_OPTIMIZE:--O2}
COMPILER=${CXX:-c++}
cd "$(dirname "$0")/.."

command -v "$COMPILER" >/dev/null || { echo "No C++ compiler '$COMPILER': install g++, or export CXX=..." >&2; exit 1; }
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
BIN=$(cd "$VENV/bin" && pwd)
"$BIN/python" -m pip install --quiet --constraint constraints.txt torch numpy

# what is built fits this Python and this torch only
TAG=$("$BIN/python" -c 'import sys, torch; print("py%d%d-torch%s" % (*sys.version_info[:2], torch.__version__))')
WHEELS=${HOROVOD_WHEELS:-build/horovod}/$TAG
mkdir -p "$WHEELS"
WHEELS=$(cd "$WHEELS" && pwd)

if ! ls "$WHEELS/horovod-$VERSION"-*.whl >/dev/null 2>&1; then
    echo "Building Horovod $VERSION, which takes minutes; the wheel is kept in $WHEELS."
    # cmake 4 no longer takes the files of its submodules, newer setuptools not its setup.py
    "$BIN/python" -m pip install --quiet "setuptools==69.5.1" wheel "cmake<4" cloudpickle psutil pyyaml packaging cffi
    cat >"$WHEELS/c++" <<WRAPPER
#!/bin/sh
# called as c++ by Horovod's build: C++20 instead of whatever it asks for, and no debug information
set -- "\$@" --end
while [ "\$1" != --end ]; do
    case \$1 in
        -std=*) set -- "\$@" -std=c++20 ;;
        -O[123]) set -- "\$@" $OPTIMIZE ;;
        -g) ;;
        *) set -- "\$@" "\$1" ;;
    esac
    shift
done
shift
exec $(command -v "$COMPILER") "\$@"
WRAPPER
    chmod +x "$WHEELS/c++"
    PATH=$BIN:$PATH CXX=$WHEELS/c++ MAKEFLAGS=-j$("$BIN/python" -c 'import os; print(os.cpu_count() or 1)') \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
        "$BIN/python" -m pip wheel --no-build-isolation --no-deps --no-binary horovod \
        --wheel-dir "$WHEELS" "horovod==$VERSION"
fi

"$BIN/python" -m pip install --quiet --constraint constraints.txt --upgrade "setuptools>=77"
"$BIN/python" -m pip install --quiet --constraint constraints.txt "$WHEELS/horovod-$VERSION"-*.whl
"$BIN/python" -m pip install --quiet --constraint constraints.txt --editable ".[test]"
"$BIN/python" -c 'import horovod.torch as hvd; assert hvd.gloo_built(); print("Horovod is there: '"$VENV"'/bin/python -m framework strategy=horovod")'
