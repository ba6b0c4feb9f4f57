"""An engine is restarted, and starts warm: its cache was not in its process.

python -m examples.vllm.restart
"""

from examples.texts import READERS, SYSTEM_TEXT
from examples.vllm.server import Completion, Server, daemon


def ask_all(server: Server) -> list[Completion]:
    return [server.ask(f"{SYSTEM_TEXT}\n\nQ: {questions[0]}\nA:") for questions in READERS.values()]


def main() -> None:
    with daemon() as appliance:
        appliance.start()
        rounds = []
        for _ in range(2):
            with Server(appliance.target, appliance.folder) as server:
                server.ask_uncached("Warm up, please. " * 20)
                rounds.append(ask_all(server))
    print(f"{'reader':8}{'tokens':>8}{'cold':>9}{'cached':>8}{'restarted':>11}{'cached':>8}  answer")
    for reader, cold, warm in zip(READERS, *rounds, strict=True):
        same = "the same" if cold.text == warm.text else "DIFFERENT"
        print(
            f"{reader:8}{cold.num_tokens:>8,}{cold.ttft_s:>7.3f} s{cold.num_cached:>8,}"
            f"{warm.ttft_s:>9.3f} s{warm.num_cached:>8,}  {same}"
        )


if __name__ == "__main__":
    main()
