"""The adapter for TensorRT-LLM, with a stand-in for it: TensorRT-LLM itself has never run with kvtier."""
