"""Three readers talk to one engine in turns; its own memory holds one of their conversations.

    python -m examples.vllm.chat

A reader that comes back finds its history overwritten by the other two: vLLM alone would compute it from
the beginning. With kvtier it comes back from the appliance. Each question is asked a second time under a salt
of its own, which nothing stored can serve: that is what the reader would have waited without any cache.
"""

from examples.texts import READERS, SYSTEM_TEXT
from examples.vllm.server import Server, daemon

NUM_TURNS = 3


HEADER = f"{'reader':8}{'turn':>5}{'tokens':>8}{'cached':>8}{'first token':>13}{'uncached':>10}{'gain':>7}"


def main() -> None:
    with daemon() as appliance:
        appliance.start()
        with Server(appliance.target, appliance.folder) as server:
            server.ask_uncached("Warm up, please. " * 20)
            print(HEADER)
            talk(server)
            found = server.metric("vllm:external_prefix_cache_hits_total")
        num_blocks = appliance.status().num_blocks
    print(f"\n{found:,.0f} tokens came from the appliance; it holds {num_blocks} blocks.")


def talk(server: Server) -> None:
    histories = dict.fromkeys(READERS, SYSTEM_TEXT)
    for turn in range(NUM_TURNS):
        for reader, questions in READERS.items():
            prompt = f"{histories[reader]}\n\nQ: {questions[turn]}\nA:"
            without_s = server.ask_uncached(prompt, num_new=1).ttft_s
            answer = server.ask(prompt)
            histories[reader] = prompt + answer.text
            tokens = f"{answer.num_tokens:>8,}{answer.num_cached:>8,}"
            times = f"{answer.ttft_s:>11.3f} s{without_s:>8.3f} s{without_s / answer.ttft_s:>6.1f}x"
            print(f"{reader:8}{turn + 1:>5}{tokens}{times}")


if __name__ == "__main__":
    main()
