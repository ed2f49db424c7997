#!/usr/bin/env bash
# Builds Horovod 0.28.1 from its released source package, for the torch that PYTHON has, and installs it.
#
#   scripts/build_horovod.sh [--cpu | --gpu]
#
#   PYTHON   the interpreter to build for (default: python3); a virtual environment's python will do
#   CACHE    where the built wheel is kept (default: ${XDG_CACHE_HOME:-~/.cache}/dgc)
#
# With neither flag: NCCL when torch sees a GPU, gloo otherwise. A wheel is built once for each pair of
# Horovod, torch, Python and backend, then taken from the cache.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
python=${PYTHON:-python3}
cache=${CACHE:-${XDG_CACHE_HOME:-~/.cache}/dgc}  # ~ is there also where HOME is not
backend=auto

say() { printf '%s\n' "build_horovod: $*"; }
die() { printf '%s\n' "build_horovod: $*" >&2; exit 1; }

for argument in "$@"; do
    case $argument in
        --cpu) backend=gloo ;;
        --gpu) backend=nccl ;;
        -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        *) die "the argument must be --cpu or --gpu, got '$argument'" ;;
    esac
done

# What is there, and what is missing: all of it at once, so that nobody installs one thing at a time.
command -v "$python" > /dev/null || die "PYTHON=$python is not an executable"
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
read -r torch cuda gpu abi < <("$python" - <<'PY'
import sys
try:
    import torch
except Exception as error:  # a torch that cannot be loaded is as good as none, but its reason helps
    print(f"build_horovod: importing torch failed: {error!r}", file=sys.stderr)
    print("none none no none")
else:
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    print(torch.__version__, torch.version.cuda or "none", "yes" if torch.cuda.is_available() else "no", abi)
PY
)
missing=()
[ "$torch" != none ] || missing+=("torch in $python: $python -m pip install torch")
[ "$backend" != auto ] || { [ "$cuda" != none ] && [ "$gpu" = yes ] && backend=nccl || backend=gloo; }
compiler=${CXX:-}
for candidate in g++ c++ clang++; do
    [ -n "$compiler" ] || ! command -v "$candidate" > /dev/null || compiler=$candidate
done
{ [ -n "$compiler" ] && command -v "$compiler" > /dev/null; } || missing+=("a C++17 compiler: apt-get install g++")
command -v make > /dev/null || missing+=("make: apt-get install make")
"$python" -c 'import sysconfig, pathlib, sys
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' 2> /dev/null \
    || missing+=("the Python headers: apt-get install python3-dev")
# Horovod's set-up is old enough to expect these already installed, hence no build isolation below.
packages=
for module in setuptools wheel cmake packaging cloudpickle psutil yaml cffi; do
    "$python" -c "import $module" 2> /dev/null || packages+=" ${module/yaml/pyyaml}"
done
[ -z "$packages" ] || missing+=("Python packages: $python -m pip install$packages")
if [ "$cuda" != none ]; then  # its CMake files ask for the toolkit, whatever Horovod is to use
    nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
    [ -x "$nvcc" ] || command -v nvcc > /dev/null \
        || missing+=("nvcc, as torch $torch is a CUDA build: install the toolkit for CUDA $cuda and set CUDA_HOME, or the CPU build of torch")
fi
if [ "$backend" = nccl ]; then
    [ "$torch" = none ] || [ "$cuda" != none ] || missing+=("a CUDA build of torch ($torch is for the CPU), or leave --gpu out")
    nccl_home=${HOROVOD_NCCL_HOME:-${NCCL_HOME:-}}
    if [ -z "$nccl_home" ]; then  # CUDA builds of torch bring NCCL along as a Python package
        nccl_home=$("$python" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2> /dev/null || true)
    fi
    { [ -n "$nccl_home" ] && [ -e "$nccl_home/include/nccl.h" ]; } || [ -e /usr/include/nccl.h ] \
        || missing+=("NCCL's headers: apt-get install libnccl-dev, or set HOROVOD_NCCL_HOME")
fi
if [ ${#missing[@]} -gt 0 ]; then
    say "cannot build Horovod $version; missing:" >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
fi
[ "$cuda" = none ] || [ "$backend" = nccl ] || say "torch $torch has CUDA but sees no GPU: building with gloo (--gpu for NCCL)"

key=horovod-$version-torch-${torch//+/_}-$abi-$(uname -m)-$backend
wheels=$cache/$key
if ! compgen -G "$wheels/*.whl" > /dev/null; then
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/.build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    say "fetching the source package of Horovod $version"
    echo "horovod==$version --hash=sha256:$sha256" > "$work/requirement.txt"
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --require-hashes \
        -r "$work/requirement.txt" -d "$work" || die "the source package could not be fetched, or its hash is wrong"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    # torch's headers need C++17 since 2.1; Horovod still asks for C++14.
    find "$work/horovod-$version" -path '*/third_party' -prune -o -name CMakeLists.txt -print0 \
        | xargs -0 sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/'
    # As optimised, but without debugging information, which takes two fifths of the compiler's time.
    sed -i "s/'RelWithDebInfo'/'Release'/" "$work/horovod-$version/setup.py"

    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO
    export CMAKE_POLICY_VERSION_MINIMUM=3.5  # CMake 4 refuses what the bundled libraries declare
    export MAKEFLAGS=${MAKEFLAGS_HOROVOD:--j$(nproc)} CXX=$compiler
    unset MAKELEVEL MFLAGS  # a `make setup` above us must not hand its job server down
    if [ "$backend" = nccl ]; then
        export HOROVOD_GPU_OPERATIONS=NCCL
        [ -z "$nccl_home" ] || export HOROVOD_NCCL_HOME=$nccl_home
        # NCCL as a Python package has libnccl.so.2 without the plain name that the linker looks for.
        if [ -n "$nccl_home" ] && [ ! -e "$nccl_home/lib/libnccl.so" ] && [ -e "$nccl_home/lib/libnccl.so.2" ]; then
            mkdir -p "$work/nccl/lib"
            ln -s "$nccl_home/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
            export HOROVOD_NCCL_LIB=$work/nccl/lib HOROVOD_NCCL_INCLUDE=$nccl_home/include
        fi
    fi
    log=$cache/$key.log
    say "building for torch $torch, $abi, with $backend: two to five minutes (log: $log)"
    if ! PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH \
        "$python" -m pip wheel --no-deps --no-build-isolation -v "$work/horovod-$version" -w "$work/wheel" > "$log" 2>&1; then
        grep -n -m 8 -A 3 -E 'CMake Error|[Ee]rror:' "$log" >&2 || tail -n 30 "$log" >&2
        die "the build failed; the lines above are of its log, $log"
    fi
    mv "$work/wheel" "$wheels"  # whole or not at all: an interrupted build leaves no wheel behind
fi
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheels"/*.whl
(cd / && "$python" -c 'import horovod.torch') || die "Horovod was built but does not import"
say "Horovod $version ($backend) is installed"
