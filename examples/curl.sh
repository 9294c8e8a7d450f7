#!/usr/bin/env bash
# What a cluster answers, by hand. URL defaults to the one of `vllm-tetri up`.
set -euo pipefail
URL=${URL:-http://127.0.0.1:8000}
MODEL=${MODEL:-$(curl -fsS "$URL/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')}

echo "# a chat, streamed; the headers say which instances served it"
curl -fsSN -D - "$URL/v1/chat/completions" -H 'content-type: application/json' -d @- <<JSON
{"model": "$MODEL", "stream": true, "max_tokens": 32,
 "messages": [{"role": "user", "content": "What is the capital of France?"}]}
JSON

echo "# a completion, whole"
curl -fsS "$URL/v1/completions" -H 'content-type: application/json' -d @- <<JSON
{"model": "$MODEL", "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
JSON
echo

echo "# the instances and what they did"
curl -fsS "$URL/tetri/v1/instances"
echo
