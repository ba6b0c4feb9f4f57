"""`kvtier story`: everything remembered about one block or session, with the reasons."""

import click

from ...v1 import admin_pb2
from ..config.units import about_duration
from .names import name_subject
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
    name_subject(request, kind, name)
    with admin(resolve(target)) as stub:
        answer = stub.GetStory(request, timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
        return
    screen = console()
    ages = [f"{about_duration(max(0.0, answer.uptime_s - line.at_s))} ago" for line in answer.lines]
    width = max(map(len, ages), default=0)
    for age, line in zip(ages, answer.lines, strict=True):
        why = f"  [dim]{_escape(line.why)}[/dim]" if line.why else ""
        screen.print(f"[bold]{age:>{width}}[/bold]  {_escape(line.what)}{why}", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
