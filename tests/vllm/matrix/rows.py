"""Versions and features of the table. A feature is shown by tests of one file, which share engines.

`keyword` is a part of their names. A feature without tests says why nothing runs: it is in the table all the
same.
"""

from dataclasses import dataclass

from kvtier.clients.vllm.versions import TESTED

NO_CPU_BUILD = {"0.33": "no build for the CPU yet; its interface is compared (contract)"}
PATCHES = {version: f"{version}.0" for version in TESTED}
PINNED = "0.32"  # of requirements-vllm.txt
INTERFACE = "tests/vllm/contract"
FEATURES = "tests/vllm/features"
SHARED = (f"{FEATURES}/test_requests.py",)  # one engine for all its tests


@dataclass(frozen=True, slots=True)
class Row:
    """One feature."""

    name: str
    path: str = ""  # of a test file; empty: nothing can run
    keyword: str = ""
    why_not: str = ""  # nothing can run


ROWS = (  # the most telling first
    Row("the interface: hooks, imports, layouts (contract)", INTERFACE),
    Row("hits are vLLM's own, bit for bit; restarts; nvme", "tests/vllm/e2e/test_same_answers.py"),
    Row("kvtier killed, stopped, late", "tests/vllm/e2e/test_failures.py"),
    Row("LoRA adapters that take turns", f"{FEATURES}/test_requests.py", "adapters"),
    Row("prompt embeddings", f"{FEATURES}/test_requests.py", "embeddings"),
    Row("structured output", f"{FEATURES}/test_requests.py", "structured"),
    Row("n > 1", f"{FEATURES}/test_requests.py", "several"),
    Row("beam search", f"{FEATURES}/test_requests.py", "beams"),
    Row("priority scheduling", f"{FEATURES}/test_requests.py", "priorities"),
    Row("pause and wake (sleep level 0)", f"{FEATURES}/test_requests.py", "pause"),
    Row("weights loaded anew while it runs", f"{FEATURES}/test_requests.py", "weights"),
    Row("KV of the version before; kvtier upgraded under both", f"{FEATURES}/test_upgrade.py"),
    Row("kvtier full", f"{FEATURES}/test_full.py"),
    Row("prompts in chunks, preemption by recompute, aborts", "tests/vllm/e2e/test_crowds.py"),
    Row("recurrent state: gated delta rule (Qwen3-Next)", f"{FEATURES}/test_models.py", "gdn"),
    Row("sliding windows (Gemma 3)", f"{FEATURES}/test_models.py", "hybrid"),
    Row(
        "sliding windows kept at checkpoints (Gemma 3, GPT-OSS)", f"{FEATURES}/test_models.py", "checkpoints"
    ),
    Row("tensor parallel 2", f"{FEATURES}/test_engines.py", "tensor parallel 2"),
    Row("speculative decoding, by n-grams", f"{FEATURES}/test_engines.py", "by words"),
    Row("speculative decoding, by a draft model", f"{FEATURES}/test_engines.py", "draft model"),
    Row("pipeline parallel 2", f"{FEATURES}/test_engines.py", "pipeline parallel"),
    Row("blocks of 32 and of 128 tokens on one daemon", f"{FEATURES}/test_engines.py", "block_sizes"),
    Row("chunk sizes that differ between engines", f"{FEATURES}/test_engines.py", "chunk_sizes"),
    Row("MultiConnector", f"{FEATURES}/test_engines.py", "mixture"),
    Row("fp8 KV", f"{FEATURES}/test_engines.py", "fp8"),
    Row("sliding windows with sinks (GPT-OSS)", f"{FEATURES}/test_models.py", "sinks"),
    Row("latent attention, MLA (DeepSeek V2)", f"{FEATURES}/test_models.py", "mla"),
    Row("recurrent state: Mamba-2 (Granite 4)", f"{FEATURES}/test_models.py", "mamba"),
    Row("tensor parallel 4", f"{FEATURES}/test_engines.py", "tensor parallel 4"),
    Row(
        "multimodal inputs",
        why_not="no test yet: vLLM's LLaVA, Gemma 3 and Qwen-VL import torchvision, which is not there",
    ),
    Row("data parallel 2, with `vllm serve`", f"{FEATURES}/test_serving.py", "data_parallel"),
    Row("sleep that gives memory back (levels 1, 2)", why_not="vLLM has it on CUDA and ROCm only"),
)
