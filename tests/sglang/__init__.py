"""The storage backend for SGLang's HiCache, against SGLang's real classes where they are installed."""
