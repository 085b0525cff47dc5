#!/usr/bin/env bash
# Everything that only a GPU can show, in one go of less than seven minutes: tests, compilation, benchmark, verdict.
# Usage: bash benchmarks/gpu_check.sh OUT_FOLDER [COMMIT] [SECONDS_FOR_THE_BENCHMARK]
# It goes on after a failure, says at the end what failed, and returns 1 then. Peers are measured where installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: bash benchmarks/gpu_check.sh OUT_FOLDER [COMMIT] [SECONDS_FOR_THE_BENCHMARK]}
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
deadline=${3:-330}
mkdir -p "$out"
failed=()

part() { # name, command...
    local name=$1 started=$SECONDS
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$out/$name.log" | tail -n 60
    [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$name")
    echo "== $name: $((SECONDS - started)) s"
}

part tests python3 -m pytest -q -p no:cacheprovider -m "gpu or not gpu" tests/gpu tests/kernels/test_triton_step.py \
    tests/kernels/test_triton_norm.py tests/kernels/test_split_kernel.py tests/kernels/test_codes.py tests/kernels/test_fuzz.py \
    tests/kernels/test_anchors_in_short.py tests/test_precision.py tests/test_memory.py tests/test_clip.py
part compile_time python3 -m benchmarks.compile_time
part sustained python3 -m benchmarks.sustained
part step python3 -m benchmarks.step --device cuda --commit "$commit" --timeout 120 --deadline "$deadline" \
    --out "$out/step-h200.json" --plot "$out/step-h200.png"
part verdict python3 -m benchmarks.verdict "$out/step-h200.json"

echo "failed: ${failed[*]:-nothing}"
[ ${#failed[@]} = 0 ]
