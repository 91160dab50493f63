#!/usr/bin/env bash
# Trains under Nsight Systems: one report for each rank that is wanted, of a few steps.
#
#     profiling/nsys_train.sh RECIPE [FIELD=VALUE ...]
#
# Environment:
#   GPUS         processes, one for each GPU                               (1)
#   NSYS_RANKS   ranks to profile, separated by commas                     (0)
#   NSYS_STEPS   how many steps                                            (5)
#   NSYS_FIRST   the first of them                                         (20)
#   NSYS_LAYERS  1: which operator of the forward a kernel of the backward
#                belongs to; slower, so take times from a run without      (0)
#   NSYS_OUT     folder for the reports                                    (profiles)
#
# Then: python profiling/report.py NSYS_OUT/*.sqlite --output REPORT
#
# The profiler sits inside torchrun, around each process, so that ranks which are not wanted run
# without it. The trainer opens and closes the capture range itself, by step numbers; with
# --capture-range-end=stop it then goes on to train, where nsys would kill it by default.
set -euo pipefail

if [[ ${1:-} == --rank ]]; then
    # Called by torchrun, once for each process.
    shift
    case ",${NSYS_RANKS:-0}," in
        *",$RANK,"*) ;;
        *) exec "$@" training.profile.tool=none ;;
    esac
    exec nsys profile \
        --trace=cuda,nvtx,cublas,cudnn --sample=none --cpuctxsw=none \
        --capture-range=cudaProfilerApi --capture-range-end=stop \
        --cuda-graph-trace=node --export=sqlite --force-overwrite=true \
        --output="${NSYS_OUT:-profiles}/%h_rank%q{RANK}" "$@"
fi

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set -euo/{s/^# \{0,1\}//;/^set -euo/d;p}' "$0"
    [[ $# -ge 1 ]] && exit 0 || exit 2
fi
if ! command -v nsys >/dev/null; then
    echo "nsys_train.sh: nsys is not on the PATH: install Nsight Systems, or train with" \
        "training.profile.tool=kineto, which needs torch alone." >&2
    exit 2
fi

mkdir -p "${NSYS_OUT:-profiles}"
layers=false
[[ ${NSYS_LAYERS:-0} == 1 ]] && layers=true
# Without --standalone, so that a cluster's own rendezvous variables would be obeyed.
exec torchrun --nproc-per-node="${GPUS:-1}" --no-python "$0" --rank \
    python -u -m effasr.train "$@" \
    training.profile.tool=nsys "training.profile.first_step=${NSYS_FIRST:-20}" \
    "training.profile.steps=${NSYS_STEPS:-5}" "training.profile.layers=$layers"
