"""Counts the steps of a script that says nothing of them itself, and reports them to the launcher as
`trainers.progress` does: a step is done when an optimizer of torch has taken one. Of several optimizers that
take turns, it is a round of all; the first number follows the steps that a loaded state of Adam and its like
remembers.

Not counted: steps that `torch.compile` compiles whole, replayed CUDA graphs, optimizers that are none of
torch's. Runs in any Python 3, also one without fleetrun: standard library only.
"""

import os
import sys
import time

_PERIOD = 0.1  # seconds between two reports: the status line shows the newest step


class Steps:
    """Of this process. `mark` and `path`: its id, and the launcher's datagram socket."""

    def __init__(self, mark, path):
        self.mark = mark
        self._path = path
        self._pid = os.getpid()
        self._torch = None
        self._number = None
        self._round = set()
        self._ended = self._took = None
        self._next = float("-inf")
        self._socket = None
        self._news = False
        self.tell = self._report
        """Is called with the number of each step, then; for somebody else who reports."""
        self.begun = None
        """Is called once, before the first step is told."""

    def watch(self, module):
        """`module` is `torch.optim.optimizer`. One of an old torch cannot be watched."""
        self._torch = sys.modules["torch"]
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._hook)

    def last(self):
        """The number of the last step, how many seconds ago it ended, and how many it took, None for the
        first one; None if there was none.
        """
        if self._ended is None:
            return None
        return [self._number, time.monotonic() - self._ended, self._took]

    def end(self):
        """Of the script: report what has not been."""
        if self._news and os.getpid() == self._pid:
            self._next = float("-inf")
            self._report(self._number)
        self._forget_stolen()
        if self._socket is not None:
            self._socket[0].close()
            self._socket = None

    def _hook(self, optimizer, args, kwargs):
        compiling = getattr(getattr(self._torch, "compiler", None), "is_compiling", None)
        if compiling is None or compiling():  # what follows would break the graph
            return
        try:
            self._stepped(optimizer)
        except Exception:  # the script matters more
            pass

    def _stepped(self, optimizer):
        key = id(optimizer)
        if self._number is None:
            self._number = _remembered(optimizer, self._torch) - 1
        elif key not in self._round:
            self._round.add(key)
            return
        now = time.monotonic()
        self._round = {key}
        self._number += 1
        self._took = None if self._ended is None else now - self._ended
        self._ended = now
        if self.begun is not None:
            begun, self.begun = self.begun, None
            begun()
        self.tell(self._number)

    def _report(self, number):
        """Never waits; a report that the launcher does not take is lost."""
        now = time.monotonic()
        self._news = True
        if now < self._next or os.getpid() != self._pid:
            return
        self._next = now + _PERIOD
        self._news = not self._send({"mark": self.mark, "step": number, "time": time.time()})

    def alive(self, **more):
        """Report that there is a process, without a step; and what else is known of it."""
        if os.getpid() == self._pid:
            self._send(dict(more, mark=self.mark, time=time.time()))

    def _send(self, said):
        """Whether the launcher took it."""
        import json

        try:
            self._forget_stolen()
            if self._socket is None:
                self._socket = _connected(self._path)
            self._socket[0].send(json.dumps(said).encode())
            return True
        except OSError:
            return False

    def _forget_stolen(self):
        """A script may close all descriptors that it does not know, and use this number itself."""
        if self._socket is None:
            return
        sock, inode = self._socket
        try:
            same = os.fstat(sock.fileno()).st_ino == inode
        except OSError:
            same = False
        if not same:
            sock.detach()
            self._socket = None


def _remembered(optimizer, torch):
    """How many steps its state has seen, this one too; 1 if nothing tells."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is int or (type(step) is torch.Tensor and step.device.type == "cpu"):
            return max(1, int(step))  # of a GPU it would wait, of a DTensor call the other ranks
        break
    return 1


def _connected(path):
    """The socket and its inode. Raises OSError."""
    import socket

    folder, name = os.path.split(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            sock.connect("/proc/self/fd/{}/{}".format(descriptor, name))  # an address has 107 bytes at most
        finally:
            os.close(descriptor)
        return sock, os.fstat(sock.fileno()).st_ino
    except OSError:
        sock.close()
        raise
