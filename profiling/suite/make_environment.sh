#!/usr/bin/env bash
# Makes the environment of a machine with a GPU as it is found, to rehearse the suite in:
#
#     profiling/suite/make_environment.sh DIR [PYTHON]
#     DIR/bin/python profiling/gpu_suite.py --dry-run --call 1
#
# torch 2.11.0 with CUDA, triton 3.6.0, numpy 2.5, transformers 5.17.0 and pytest; neither lhotse
# nor any package for audio files. Several GB. PYTHON is python3.12 where that exists, else python3.
set -euo pipefail

if [[ $# -lt 1 || $# -gt 2 ]]; then
    echo "usage: $0 DIR [PYTHON]" >&2
    exit 2
fi
folder=$1
python=${2:-$(command -v python3.12 || command -v python3)}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$0: needs Python 3.11 or newer, and $python is older: name another one." >&2
    exit 2
}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    "torch==2.11.0" "triton==3.6.0" "numpy==2.5.*" "transformers==5.17.0" \
    safetensors sentencepiece tokenizers pyyaml rich tensorboard setuptools wheel ninja \
    pytest pytest-xdist pytest-timeout hypothesis

# What is not there must not be there: a rehearsal with it would show nothing.
for name in lhotse soundfile soxr jiwer nvtx jsonargparse librosa; do
    if "$folder/bin/python" -c "import $name" 2>/dev/null; then
        echo "$0: $name is installed in $folder, and must not be: remove it." >&2
        exit 1
    fi
done
"$folder/bin/python" -c 'import torch, triton, numpy, transformers
print(*(f"{x.__name__} {x.__version__}" for x in (torch, triton, numpy, transformers)), sep=", ")'
