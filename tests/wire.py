"""What was promised on the wire: one line per field, enum value and call, and the test that each is kept.

    python -m tests.wire --extend     (with a release: what is new is promised from then on)

`tests/wire_promises.txt` only grows. A promise is kept when the same line still describes the .proto files,
or when a field or value is gone and both its number and its name are `reserved`. So clients and daemons of
different ages understand each other: what is gone cannot come back as something else. `buf breaking` says the
same of a Git history; a file of lines was chosen because there is nothing to install, its diff is readable,
and what counts is what was released, not what stood on a branch.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from kvtier.v1 import admin_pb2, direct_pb2, events_pb2, kvcache_pb2, local_pb2, peer_pb2, types_pb2
from kvtier.v1.local import Flag, Method

PROMISES = Path(__file__).parent / "wire_promises.txt"
MODULES = (types_pb2, kvcache_pb2, admin_pb2, events_pb2, local_pb2, direct_pb2, peer_pb2)


def files() -> list[FileDescriptorProto]:
    """Return the .proto files as they are now."""
    found = []
    for module in MODULES:
        module.DESCRIPTOR.CopyToProto(file := FileDescriptorProto())
        found.append(file)
    return found


def lines(of: Iterable[FileDescriptorProto]) -> set[str]:
    """Return everything that the files say of the wire."""
    said: set[str] = set()
    for file in of:
        for message in file.message_type:
            said.update(_of_message(f"{file.package}.{message.name}", message))
        for enum in file.enum_type:
            said.update(_of_enum(f"{file.package}.{enum.name}", enum))
        for service in file.service:
            said.update(_of_service(f"{file.package}.{service.name}", service))
    return said


def frame_lines() -> set[str]:
    """Return what local.py says of the local channel's frames."""
    methods = {f"frame Method {method.value} {method.name}" for method in Method}
    return methods | {f"frame Flag {flag.value} {flag.name}" for flag in Flag if flag}


def broken(promises: Iterable[str], of: Iterable[FileDescriptorProto], frames: set[str]) -> list[str]:
    """Return the promises that are not kept, each with what to do."""
    of = list(of)
    said = lines(of) | frames
    retired = set(_retired(of))
    problems = []
    for promise in sorted(set(promises) - said):
        kind, owner, number, name = promise.split()[:4]
        if kind in ("field", "value") and (owner, number) in retired and (owner, name) in retired:
            continue
        problems.append(
            f"{promise}: gone, or not the same any more; restore it, or {_fix(kind, number, name)}"
        )
    return problems


def _fix(kind: str, number: str, name: str) -> str:
    if kind in ("field", "value"):
        return f'say `reserved {number};` and `reserved "{name}";` and give its successor another number'
    return "add another beside it"


def _of_message(name: str, message: DescriptorProto) -> Iterator[str]:
    for field in message.field:
        yield f"field {name} {field.number} {field.name} {_kind(field, message)}"
    for below in message.nested_type:
        yield from _of_message(f"{name}.{below.name}", below)
    for enum in message.enum_type:
        yield from _of_enum(f"{name}.{enum.name}", enum)


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    type_name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    words = [field.type_name.lstrip(".") or type_name]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        words.insert(0, "repeated")
    elif field.proto3_optional:
        words.insert(0, "optional")
    elif field.HasField("oneof_index"):
        words.append(f"in {message.oneof_decl[field.oneof_index].name}")
    return " ".join(words)


def _of_enum(name: str, enum: EnumDescriptorProto) -> Iterator[str]:
    for value in enum.value:
        yield f"value {name} {value.number} {value.name}"


def _of_service(name: str, service: ServiceDescriptorProto) -> Iterator[str]:
    for call in service.method:
        takes = ("stream " if call.client_streaming else "") + call.input_type.lstrip(".")
        gives = ("stream " if call.server_streaming else "") + call.output_type.lstrip(".")
        yield f"call {name} {call.name} takes {takes} gives {gives}"


def _retired(of: Iterable[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    """Yield (message or enum, number or name) of everything that is reserved."""
    for file in of:
        for message in file.message_type:
            owner = f"{file.package}.{message.name}"
            for span in message.reserved_range:
                yield from ((owner, str(number)) for number in range(span.start, span.end))
            yield from ((owner, name) for name in message.reserved_name)
        for enum in file.enum_type:
            owner = f"{file.package}.{enum.name}"
            for values in enum.reserved_range:  # an enum's ranges include their end
                yield from ((owner, str(number)) for number in range(values.start, values.end + 1))
            yield from ((owner, name) for name in enum.reserved_name)


def promises() -> list[str]:
    """Return what was promised so far."""
    return [line for line in PROMISES.read_text().splitlines() if line and not line.startswith("#")]


def main() -> None:
    """Promise what is new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--extend", action="store_true", required=True)
    parser.parse_args()
    known = promises() if PROMISES.exists() else []
    said = lines(files()) | frame_lines()
    header = "# What was released of the wire. It only grows: python -m tests.wire --extend\n"
    PROMISES.write_text(header + "".join(f"{line}\n" for line in sorted({*known, *said})))


if __name__ == "__main__":
    main()
