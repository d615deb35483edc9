"""Succession: the job goes on with other trainers. Knows what is left of the former ones; leaves to `keeper`
that it is kept.

A server that kept its tables may come back in a job with more trainers or fewer, or with as many others. What
is in its tables stays. Who the former trainers were is forgotten, so that nothing that they may still send
counts. The same number of trainers goes on rank by rank. Another number shares what was done:

    every new trainer begins at (steps of all former trainers that are in the tables) / (new trainers),
    rounded down; a step of sync training that some had pushed and others had not is dropped

Servers count by themselves, and one may have more in its tables than another when all are killed. Trainers
begin with the least of their counts; a server ignores pushes of steps before its own.
"""

from __future__ import annotations

from trainers.ps.net.wire import Field, Kind, Message, bytes_part
from trainers.ps.server.members import Members
from trainers.ps.server.steps import Steps


def successors(count: int, start: str) -> Message:
    """The record of so many trainers of this start of the job."""
    return Message(kind=Kind.TRAINERS, number=count, parts=(bytes_part(Field.TEXT, start.encode()),))


def succeed(record: Message, members: Members, steps: Steps) -> None:
    """Let the trainers of the record take all places."""
    count = record.number
    if count == len(members):
        members.succeed([member.step for member in members], record.text)
        return
    step = sum(steps.done(member) for member in members) // count
    steps.begin(step)
    members.succeed([step] * count, record.text)
