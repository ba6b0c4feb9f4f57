"""`kvtier story`: everything remembered about one block or session, with the reasons."""

import click

from ...v1 import admin_pb2
from .names import parse_block
from .output import console, plain, print_json
from .target import TIMEOUT_S, admin, json_option, resolve, target_option


@click.command()
@click.argument("kind", type=click.Choice(["block", "session"]))
@click.argument("name")
@target_option
@json_option
def story(kind: str, name: str, target: str | None, as_json: bool) -> None:
    """Tell what happened to a block or a session, oldest first, and why.

    NAME is a session's id, or NAMESPACE:HASH for a block, with the first 8 hex digits of its prefix
    hash or more.

    \b
    Example:
      kvtier story block 1:5f3a9c01
      kvtier story session agent-42 --json
    """
    request = admin_pb2.GetStoryRequest()
    if kind == "block":
        request.block.CopyFrom(parse_block(name))
    else:
        request.session_id = name
    with admin(resolve(target)) as stub:
        answer = stub.GetStory(request, timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
        return
    screen = console()
    for line in answer.lines:
        why = f"  [dim]{_escape(line.why)}[/dim]" if line.why else ""
        screen.print(f"[bold]{line.at_s:12.3f} s[/bold]  {_escape(line.what)}{why}", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
