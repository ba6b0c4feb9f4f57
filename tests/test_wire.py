"""What was released of the wire is kept; every way to break it is noticed."""

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

from . import wire

Files = dict[str, FileDescriptorProto]


def test_every_promise_is_kept() -> None:
    assert wire.broken(wire.promises(), wire.files(), wire.frame_lines()) == []


def test_there_are_promises() -> None:
    kinds = [promise.split()[0] for promise in wire.promises()]
    assert {kind: kinds.count(kind) > 15 for kind in kinds} == dict.fromkeys(
        ("call", "field", "frame", "value"), True
    )
    assert wire.PROMISES.read_text().splitlines()[1:] == sorted(wire.promises())


def message(files: Files, name: str) -> DescriptorProto:
    return next(one for file in files.values() for one in file.message_type if one.name == name)


def enum(files: Files, name: str) -> EnumDescriptorProto:
    return next(one for file in files.values() for one in file.enum_type if one.name == name)


def remove_a_field(files: Files) -> None:
    del message(files, "AcquireRequest").field[0]


def renumber_a_field(files: Files) -> None:
    message(files, "AcquireRequest").field[0].number = 900


def rename_a_field(files: Files) -> None:
    message(files, "AcquireRequest").field[0].name = "customer_id"


def retype_a_field(files: Files) -> None:
    field = message(files, "AcquireRequest").field[0]
    field.type = field.TYPE_DOUBLE
    field.ClearField("type_name")


def repeat_a_field(files: Files) -> None:
    field = message(files, "AcquireRequest").field[0]
    field.label = field.LABEL_REPEATED


def reserve_only_its_number(files: Files) -> None:
    changed = message(files, "AcquireRequest")
    changed.reserved_range.add(start=changed.field[0].number, end=changed.field[0].number + 1)
    del changed.field[0]


def remove_a_value(files: Files) -> None:
    del enum(files, "Tier").value[-1]


def renumber_a_value(files: Files) -> None:
    enum(files, "Tier").value[-1].number = 90


def remove_a_call(files: Files) -> None:
    del files["kvtier/v1/kvcache.proto"].service[0].method[0]


def stream_a_call(files: Files) -> None:
    method = files["kvtier/v1/kvcache.proto"].service[0].method[0]
    method.client_streaming = not method.client_streaming


def remove_a_message(files: Files) -> None:
    del files["kvtier/v1/admin.proto"].message_type[0]


BREAKING = (
    remove_a_field,
    renumber_a_field,
    rename_a_field,
    retype_a_field,
    repeat_a_field,
    reserve_only_its_number,
    remove_a_value,
    renumber_a_value,
    remove_a_call,
    stream_a_call,
    remove_a_message,
)


def found_after(change: Callable[[Files], None]) -> list[str]:
    files = {file.name: file for file in wire.files()}
    change(files)
    return wire.broken(wire.promises(), files.values(), wire.frame_lines())


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_what_breaks_old_clients_is_refused(change: Callable[[Files], None]) -> None:
    assert found_after(change)


def test_a_frame_number_that_is_given_away_is_refused() -> None:
    frames = wire.frame_lines() - {"frame Method 5 ACQUIRE"} | {"frame Method 5 FETCH"}
    [problem] = wire.broken(wire.promises(), wire.files(), frames)
    assert problem.startswith("frame Method 5 ACQUIRE: gone")


def test_what_is_retired_with_number_and_name_may_go() -> None:
    def retire(files: Files) -> None:
        changed = message(files, "AcquireRequest")
        field = changed.field[0]
        changed.reserved_range.add(start=field.number, end=field.number + 1)
        changed.reserved_name.append(field.name)
        del changed.field[0]

    def retire_a_value(files: Files) -> None:
        changed = enum(files, "Tier")
        value = changed.value[-1]
        changed.reserved_range.add(start=value.number, end=value.number)
        changed.reserved_name.append(value.name)
        del changed.value[-1]

    assert found_after(retire) == []
    assert found_after(retire_a_value) == []


def test_what_is_added_breaks_nothing() -> None:
    def add(files: Files) -> None:
        message(files, "AcquireRequest").field.add(name="more", number=901, type="TYPE_BOOL")

    assert found_after(add) == []
