"""The real engine, vLLM on the CPU, with and without kvtier; tests/vllm/e2e and -m bench.vllm drive it."""
