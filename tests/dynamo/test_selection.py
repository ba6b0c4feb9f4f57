"""Dynamo's selection service sends a prompt to the host whose memory has most of it."""

from pathlib import Path

from ..vllm.unit.announcing_scene import GROUP, NAMES, TOKENS, demote
from ..waiting import until
from .services import MODEL, PublishingEngine, Service, Stream, stored


def register(service: Service, worker: int, stream: Stream) -> None:
    service.call(
        "/workers",
        worker_id=worker,
        model_name=MODEL,
        endpoint=f"http://worker{worker}:8000",
        block_size=GROUP.block_tokens,
        data_parallel_start_rank=0,
        data_parallel_size=1,
        max_num_batched_tokens=8192,
        total_kv_blocks=10000,
        kv_events_endpoints={"0": stream.endpoint},
    )
    stream.until_heard()


def test_a_longer_prefix_in_memory_beats_a_short_one_on_the_gpu(tmp_path: Path) -> None:
    """Half of the prompt on the GPU against all of it in dram; then all of it on nvme; then nothing."""
    with Service("dynamo.select_service", tmp_path) as service:
        other, stream = Stream(tmp_path / "other"), Stream(tmp_path / "engine")
        register(service, 1, other)
        register(service, 2, stream)
        half = 2 * GROUP.block_tokens
        other.send(stored([1, 2], list(TOKENS[:half]), medium="GPU"))

        def until_picked(worker: int, num_left: int) -> None:
            def answer() -> tuple[int, float]:
                found = service.call("/select", model_name=MODEL, token_ids=list(TOKENS))
                return found["worker_id"], found["effective_prefill_tokens"]

            until(lambda: answer() == (worker, num_left), answer)

        until_picked(1, len(TOKENS) - half)
        engine = PublishingEngine(tmp_path, stream)
        try:
            for rank in (0, 1):
                engine.put(rank)
            engine.announce()
            engine.until(dict.fromkeys(NAMES, "CPU"))
            until_picked(2, len(TOKENS) // 4)  # a token in CPU counts 0.75 by default
            demote(engine)
            engine.until(dict.fromkeys(NAMES, "STORAGE"))
            until_picked(1, len(TOKENS) - half)  # one in STORAGE 0.25
            engine.evict("nvme")
            engine.until({})
            until_picked(1, len(TOKENS) - half)
        finally:
            engine.close()
            other.close()
