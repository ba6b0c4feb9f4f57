"""kvtier's cache for llama-cpp-python, with a model made on the spot: `make test-llamacpp`."""
