"""The backend held to the real HiCacheStorage, factory and file backend of SGLang."""
