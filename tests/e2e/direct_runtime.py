"""A runtime in a process of its own, for test_direct_processes.py: does what it reads from stdin, line by
line.

    fill SEED | put NAME ID,ID,... | get NAME ID,ID,... | read ID,ID,... | archive NAME | quit

Every answer is one line. `get&` and `put&` answer before they are done. What is put belongs to session NAME.
"""

import hashlib
import sys

from .direct_scene import Runtime, names


def main(target: str) -> None:
    runtime = Runtime(target, is_live=False, num_events=1)
    print("ready", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        ids = [int(number) for number in rest[-1].split(",")] if rest and word != "archive" else []
        if word == "archive":
            runtime.client.session(rest[0]).end(archive=True)
            answer = "archived"
        elif word == "fill":
            runtime.fill(ids[0])
            answer = "filled"
        elif word == "put":
            chain = names(rest[0], len(ids))
            answer = str(runtime.pages.put(runtime.namespace, chain, ids, session=rest[0]).num_stored)
        elif word == "get":
            report = runtime.pages.get(runtime.namespace, names(rest[0], len(ids)), ids)
            answer = f"{report.num_loaded} {report.num_stored}"
        elif word == "get&":
            runtime.pages.begin_get(runtime.namespace, names(rest[0], len(ids)), ids)
            answer = "begun"
        elif word == "put&":
            runtime.start(runtime.pages.put, runtime.namespace, names(rest[0], len(ids)), ids)
            answer = "begun"
        elif word == "read":
            answer = hashlib.sha256(runtime.read(ids)).hexdigest()
        else:
            assert word == "quit"
            runtime.close()
            return
        print(answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
