#!/bin/sh
# vLLM with kvtier in two lines. Ctrl-C ends both. Usage: serve.sh MODEL [argument of vllm serve ...]
set -e
target=unix://${TMPDIR:-/tmp}/kvtier-$$/kvtier.sock
mkdir -p -m 700 "${target#unix://}" && rmdir "${target#unix://}"

kvtier serve --listen "$target" & trap 'kill $!' EXIT
KVTIER_TARGET=$target vllm serve "$@" --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.clients.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
