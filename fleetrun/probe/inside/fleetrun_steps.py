"""Count the steps of a script that does not report them, and report them to the launcher as
`trainers.progress` does.

A step is done when an optimizer of torch has taken a step. If several optimizers take turns, a round of all
is one step. The first number continues from the steps in a loaded state of Adam and similar optimizers.

Not counted are steps that `torch.compile` compiles as a whole, replayed CUDA graphs, and optimizers outside
torch. The module runs in any Python 3, also without fleetrun, so it uses only the standard library.
"""

import os
import sys
import time

_PERIOD = 0.1  # seconds between two reports, because the status line shows the newest step


class Steps:
    """The steps of this process. `mark` is its ID, `path` the launcher's datagram socket."""

    def __init__(self, mark, path):
        self.renew(mark, path)
        self._torch = None
        self._number = None
        self._round = set()
        self._ended = self._took = None
        self._next = float("-inf")
        self._socket = None
        self._news = False
        self.report = self._report
        """If set, called with the number of each step instead of a report."""
        self.on_start = None
        """Called once, before the first step is reported."""

    def renew(self, mark, path):
        self._mark = mark
        self._path = path
        self._pid = os.getpid()

    def watch(self, module):
        """Watch `torch.optim.optimizer`. An old torch without hooks cannot be watched."""
        self._torch = sys.modules["torch"]
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._hook)

    def last(self):
        """Return the number of the last step, the seconds since its end, and its duration.

        The duration is None for the first step. Return None before the first step.
        """
        if self._ended is None:
            return None
        return [self._number, time.monotonic() - self._ended, self._took]

    def end(self):
        """Report the remaining steps at the end of the script."""
        if self._news and os.getpid() == self._pid:
            self._next = float("-inf")
            self._report(self._number)
        self._forget_stolen()
        if self._socket is not None:
            self._socket[0].close()
            self._socket = None

    def _hook(self, optimizer, args, kwargs):
        compiling = getattr(getattr(self._torch, "compiler", None), "is_compiling", None)
        if compiling is None or compiling():  # the following calls would break the graph
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
        if self.on_start is not None:
            on_start, self.on_start = self.on_start, None
            on_start()
        self.report(self._number)

    def _report(self, number):
        """Report a step without waiting. If the launcher cannot take the report, it is lost."""
        now = time.monotonic()
        self._news = True
        if now < self._next or os.getpid() != self._pid:
            return
        self._next = now + _PERIOD
        self._news = not self._send({"mark": self._mark, "step": number, "time": time.time()})

    def alive(self, **more):
        """Report that the process is alive, without a step but with additional fields."""
        if os.getpid() == self._pid:
            self._send(dict(more, mark=self._mark, time=time.time()))

    def _send(self, fields):
        """Send a report. Return True if the launcher took it."""
        import json

        try:
            self._forget_stolen()
            if self._socket is None:
                self._socket = _connected(self._path)
            self._socket[0].send(json.dumps(fields).encode())
            return True
        except OSError:
            return False

    def _forget_stolen(self):
        """Drop the socket if the script has closed it.

        A script may close all descriptors that it does not recognize, and reuse the number.
        """
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
    """Return the number of steps in the optimizer's state, including the current step. 1 if unknown."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is int or (type(step) is torch.Tensor and step.device.type == "cpu"):
            return max(1, int(step))  # a GPU tensor would wait, and a DTensor would call the other ranks
        break
    return 1


def _connected(path):
    """Connect to the socket. Return it with its inode. Raises OSError."""
    import socket

    folder, name = os.path.split(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            sock.connect("/proc/self/fd/{}/{}".format(descriptor, name))  # an address has at most 107 bytes
        finally:
            os.close(descriptor)
        return sock, os.fstat(sock.fileno()).st_ino
    except OSError:
        sock.close()
        raise
