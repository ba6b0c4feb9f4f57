"""The real engine, vLLM's CPU build, with and without kvtier: driven by tests/vllm/e2e, measured by -m bench.vllm."""
