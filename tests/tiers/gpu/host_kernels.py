"""CUDA sources compiled for the host and run thread after thread: what a GPU would do, in some order.

Subnormal floats are flushed to zero, as operands and as results: cupy compiles with `-ftz=true`.

This proves the arithmetic and the addresses of kernels without barriers and warp operations, which is what
ours are. It proves nothing about a GPU's memory model or speed."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# What CUDA gives a kernel, as one thread after another sees it. Arguments come as words and are narrowed to
# what the kernel takes.
_HOST = """
#include <cstddef>
#include <cstring>
#include <utility>
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define __global__
#define __device__
static inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static inline int __popcll(unsigned long long word) { return __builtin_popcountll(word); }
static inline unsigned long long __umul64hi(unsigned long long left, unsigned long long right)
{ return (unsigned long long)((unsigned __int128)left * right >> 64); }
#if defined(__SSE2__)
#include <xmmintrin.h>
struct FlushToZero {  // and operands that are subnormal count as zero
    const unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};
#elif defined(__aarch64__)
struct FlushToZero {
    unsigned long before;
    FlushToZero() { asm volatile("mrs %%0, fpcr" : "=r"(before)); set(before | 1ul << 24); }
    ~FlushToZero() { set(before); }
    static void set(unsigned long word) { asm volatile("msr fpcr, %%0" : : "r"(word)); }
};
#else
#error "no way is known to flush subnormal floats here"
#endif
%(source)s
template <class... Arguments, std::size_t... I>
static void run(void (*kernel)(Arguments...), const unsigned long long* arguments, unsigned blocks,
                unsigned threads, std::index_sequence<I...>)
{
    const FlushToZero as_cupy_compiles;
    blockDim.x = threads;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kernel((Arguments)arguments[I]...);
}
template <class... Arguments>
static void start(void (*kernel)(Arguments...), const unsigned long long* arguments, unsigned blocks,
                  unsigned threads)
{
    run(kernel, arguments, blocks, threads, std::index_sequence_for<Arguments...>{});
}
%(entries)s
"""
_ENTRY = """
extern "C" void run_%(name)s(const unsigned long long* arguments, unsigned blocks, unsigned threads)
{ start(%(name)s, arguments, blocks, threads); }
"""
_FLAGS = [
    *("-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unused", "-Werror"),
    *("-fsanitize=alignment,shift", "-fno-sanitize-recover=all"),
]


class HostKernels:
    """The kernels `names` of `source`. Skips the test where there is no compiler."""

    def __init__(self, source: str, names: Sequence[str], folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++ here to compile the kernels for the host")
        entries = "".join(_ENTRY % {"name": name} for name in names)
        (folder / "kernels.cpp").write_text(_HOST % {"source": source, "entries": entries})
        library = folder / "kernels.so"
        subprocess.run([compiler, *_FLAGS, "-o", library, folder / "kernels.cpp"], check=True)
        self._library = ctypes.CDLL(str(library))
        self.blocks_and_threads = (3, 64)  # fewer than there is work: kernels stride
        self.launched: list[str] = []

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        """Run a whole launch now."""
        words = (ctypes.c_uint64 * len(arguments))(*(int(argument) for argument in arguments))
        getattr(self._library, f"run_{name}")(words, *self.blocks_and_threads)

    def __call__(self, stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        """Launch on a FakeStream: it runs when the stream gets there."""
        assert num_threads > 0
        self.launched.append(name)
        stream.call(lambda: self.run(name, arguments))


@cache
def _of_source(source: str, names: tuple[str, ...]) -> HostKernels:
    with tempfile.TemporaryDirectory(prefix="kvtier-kernels-") as folder:
        return HostKernels(source, names, Path(folder))  # the library stays mapped when its file is gone


def on_host(source: str, names: Sequence[str]) -> HostKernels:
    """Return the kernels of a source, compiled once a process: a FakeDevice's `compiler`."""
    return _of_source(source, tuple(names))
