#!/bin/sh
# Two vLLM engines on the CPU of this machine, one that prefills and one that decodes, a proxy before them, and a client that asks:
#
#     make example-vllm
#
# or, where vLLM and shmkv are installed already, examples/vllm/serve.sh [model]. It ends with the client's last answer. All of it
# is OpenAI's interface: the proxy listens on PROXY_PORT, so another client can ask, too (KEEP=1 keeps it running).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
prefill_port=${PREFILL_PORT:-8100} decode_port=${DECODE_PORT:-8200} proxy_port=${PROXY_PORT:-8000}
export SHMKV_NAMESPACE="${SHMKV_NAMESPACE:-vllm-example-$$}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_CPU_OMP_THREADS_BIND=nobind

pids=""
stop() {
  # shellcheck disable=SC2086
  [ -z "$pids" ] || kill $pids 2>/dev/null || true
  wait
  python -m shmkv gc > /dev/null 2>&1 || true       # of engines that a signal ended
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

model=${1:-}
if [ -z "$model" ]; then
  model="$work/smollm2"
  echo "making the model SmolLM2-135M-Instruct"
  python "$here/model.py" "$model"
fi

serve() { # name port role
  python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model --port "$2" --host 127.0.0.1 \
    --dtype bfloat16 --max-model-len 1024 --enforce-eager --kv-transfer-config "{
      \"kv_connector\": \"ShmkvConnector\", \"kv_connector_module_path\": \"shmkv.integrations.vllm\", \"kv_role\": \"$3\",
      \"kv_load_failure_policy\": \"recompute\"}" > "$work/$1.log" 2>&1 &
  pids="$pids $!"
}

echo "starting two engines, which takes a minute or two"
serve prefill "$prefill_port" kv_producer
serve decode "$decode_port" kv_consumer
python "$here/proxy.py" --port "$proxy_port" --prefill "http://127.0.0.1:$prefill_port" --decode "http://127.0.0.1:$decode_port" &
pids="$pids $!"

python "$here/client.py" --url "http://127.0.0.1:$proxy_port" --metrics "http://127.0.0.1:$decode_port/metrics" \
  --prefill "http://127.0.0.1:$prefill_port" --wait-s 300 || {
  tail -n 20 "$work"/*.log >&2
  exit 1
}
[ -z "${KEEP:-}" ] || { echo "the proxy listens on http://127.0.0.1:$proxy_port until Ctrl-C"; wait; }
