"""The rendezvous: what a node does next, from what it knows. Pure; `membership.py` carries it out.

The life of a round. Each step is one compare-and-set of `state/round`; the leader's steps are marked L.

                 enough nodes (L)          all have read it (L)
        +------+ ---------------> +-------+ -------------------> +-------+
   ---> | OPEN |                  |FORMING|                      |RUNNING|
        +------+ <--------------- +-------+                      +-------+
         |    ^   a member is gone, or                            |     |
         |    |   silent: generation + 1 (L)                      |     | all completed (L)
         |    |                                                   |     |
         |    |   all have stopped: generation + 1 (L)  +--------+ |     |
         |    +-----------------------------------------|STOPPING|<+     |
         |                                              +--------+  a failure, a signal: any member;
         | not enough in time, or nodes                     |       a node lost or come: L
         | that differ (L)                                  |            |
         |                      no restart: the oldest      v            v
         |                      cause is the job's (L)   +------------------+
         +---------------------------------------------> |      ENDED       |
                                                         +------------------+
                              everybody unregisters; the leader deletes what is left of the job

Of a member, in one generation (`part.py`):

   IDLE --> READY --> RUNNING --> STOPPING --> STOPPED --> IDLE (the next one)
                         |                        ^
                         +---> FINISHING ---------+--> OVER

A leader that goes is replaced: by a member at once (in OPEN by anybody), by a stranger when nobody else has
come forward for as long as a lease lasts. All that a new leader needs stands in the store.
"""

from __future__ import annotations

from fleetrun.elastic.rounds.acts import Decision
from fleetrun.elastic.rounds.following import fenced, follow
from fleetrun.elastic.rounds.leading import lead
from fleetrun.elastic.rounds.part import Part, Phase
from fleetrun.elastic.rounds.policy import Policy
from fleetrun.elastic.rounds.view import View


def decide(view: View, part: Part, policy: Policy, now: float) -> Decision:
    """What is due now. Asking again before it is done gives the same."""
    decision = follow(view, part, policy, now)
    over = part.phase is Phase.OVER
    if view.up and view.leads and not fenced(view, part) and over == (part.last is not None):
        more = lead(view, policy, now, over=over)
        decision.do(*more.acts)
        decision.look_at(more.until)
        decision.waiting = more.waiting or decision.waiting
    return decision
