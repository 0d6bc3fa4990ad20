#!/usr/bin/env bash
# The checks for a machine with an accelerator, as one script: what is there, correctness, figures, whole runs.
# Installs nothing: PYTHON names an interpreter that has torch, transformers and corrente's other dependencies.
#
#     PYTHON=python3 benchmarks/gpu/check.sh [arguments for check.py]
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if ! "$PYTHON" -c 'import torch, transformers, msgspec, anyio'; then
    echo "$PYTHON lacks one of corrente's dependencies; name one that has them: PYTHON=... $0" >&2
    exit 2
fi
timeout 360 "$PYTHON" benchmarks/gpu/check.py "$@"
checked=$?
timeout 240 "$PYTHON" benchmarks/gpu/run.py
exit $((checked || $?))
