"""Debug this process with pdb from `fleetrun debug`, which connects to a socket beside the probe's socket.

Both sides write lines of JSON, in turns. This process writes `out` (text), `words` (completions), `bye`, and
`read` when it waits. The client answers `read` with `line` (a command) or `complete`. It sends SIGINT to
interrupt the program or an expression. The module runs in any Python 3, also without fleetrun, so it uses
only the standard library.
"""

import _thread
import json
import os
import pdb
import select
import signal
import socket
import sys
import threading
import traceback

import fleetrun_probe as probe

_PERIOD = 1.0  # seconds between two reports, and between two looks for a stop notice
_LONGEST = 120  # channels.LONGEST_ACTIVITY
_ADVICE = "{}. Remove breakpoint(), or set --debug on to let it wait for `fleetrun debug`"
_REFUSALS = {
    "off": _ADVICE.format("--no_debug is set"),
    "auto": _ADVICE.format("fleetrun has no terminal, or runs in CI"),
}
_debuggers = []  # at most one, from the first stop until its client leaves
_turn = threading.RLock()  # one thread at a time has the client


def _set_trace(*args, **keywords):
    """Stop in the caller. Raises RuntimeError if no client can attach."""
    refusal = None if _debuggers else _REFUSALS.get(os.environ.get("FLEETRUN_DEBUG"))
    if os.getpid() not in probe.home:
        refusal = (
            "a child process of the rank cannot wait at breakpoint(). Remove it, or debug with num_workers=0"
        )
    if refusal is not None:
        raise RuntimeError(refusal)
    stop(sys._getframe(1))


pdb.set_trace = _set_trace


def stop(frame):
    """Stop at the next line of the frame, unless a command of pdb runs it. If pdb waits in another thread,
    wait until it continues.
    """
    if not (_debuggers and _debuggers[0].thread == _thread.get_ident()):
        _debugger().set_trace(frame)


def keep(error):
    """Stop at the traceback of the error, until the client leaves."""
    debugger = _debugger()
    lines = traceback.format_exception_only(type(error), error)  # `str(error)` may fail
    debugger.why = [lines[-1 if isinstance(error, SyntaxError) else 0].strip()]
    debugger.reset()
    try:
        debugger.interaction(None, error.__traceback__)
    except KeyboardInterrupt:  # the launcher stops the job, and the script has already ended
        pass


def _debugger():
    sys.settrace(None)  # otherwise pdb, which may be tracing, stops in its own code
    with _turn:
        if not _debuggers:
            _debuggers.append(_Debugger())
        return _debuggers[0]


class _Debugger(pdb.Pdb):
    """The debugger of this process. It is its own input and output. Without a client, text is lost."""

    why = ()
    thread = None
    """The thread in which pdb waits for a command, or executes it."""
    _alone = True
    """No client is connected."""
    _leaves = _interrupted = False

    def __init__(self):
        super().__init__(stdin=self, stdout=self, nosigint=True)
        self._client = socket.socket(socket.AF_UNIX)
        self._interrupts = threading.current_thread() is threading.main_thread()
        """True if SIGINT interrupts the program. Otherwise it would raise KeyboardInterrupt elsewhere."""
        if self._interrupts:
            self._before = signal.signal(signal.SIGINT, self.sigint_handler)

    # ---- Stops

    def interaction(self, *where):
        with _turn:
            if self._leaves:  # meanwhile, in another thread
                self.set_continue()
            else:
                self._interact(*where)

    def _interact(self, frame, trace, *more):
        stack, number = self.get_stack(frame, getattr(trace, "__traceback__", trace))
        inner, line = stack[number]
        place = f"{os.path.basename(inner.f_code.co_filename)}:{line} in {inner.f_code.co_name}"
        ended = threading.Event()
        self._notes = [*self.why, *_timeouts()]
        _thread.start_new_thread(self._report, ("; ".join([place, *self._notes]), ended))
        self.thread = _thread.get_ident()
        try:
            super().interaction(frame, trace, *more)
        finally:
            self.thread = None
            ended.set()
            if self._leaves:
                self._leave()

    def _report(self, place, ended):
        """Report the state until the stop has ended, also while an expression runs."""
        _, role, rank = os.environ["FLEETRUN_CONTAINER"].rsplit(".", 2)
        name = rank if role == "trainer" else f"{rank} --role {role}"
        while not ended.is_set():
            what = f"waits for `fleetrun debug {name}`" if self._alone else "is debugged"
            text = "".join(filter(str.isprintable, f"{what} at {place}"))
            probe.report(activity={"what": text[:_LONGEST]})
            ended.wait(_PERIOD)
        probe.report()

    def _leave(self):
        _debuggers.clear()
        self._send(bye="detached")
        self._client.close()
        if self._interrupts:
            signal.signal(signal.SIGINT, self._before)
            if self._interrupted:
                os.kill(os.getpid(), signal.SIGINT)

    def sigint_handler(self, number, frame):
        """Interrupt. If the launcher stops the job, the script gets the signal later."""
        sys.settrace(None)  # otherwise pdb with breakpoints may stop in its own code
        self._interrupted = _stops()
        super().sigint_handler(number, frame)

    def do_quit(self, line):
        """q(uit) | exit | Ctrl-D

        Leave the debugger. The process continues.
        """
        self._leaves = True
        self.clear_all_breaks()
        self.set_continue()
        return 1

    do_q = do_exit = do_EOF = do_run = do_restart = do_quit

    # ---- The client

    def _attach(self):
        """Wait for a client, and show it where the process is."""
        path = f"{os.path.dirname(probe.home[0])}/{os.environ['FLEETRUN_CONTAINER']}.probe.debug"
        self._alone = True
        with socket.socket(socket.AF_UNIX) as listener:
            probe.bind(listener, path)
            os.chmod(path, 0o600)
            listener.listen()
            if self._readable(listener):
                self._client, _ = listener.accept()
                self._alone = False
            probe.remove(path)
        for note in self._notes:
            self.message(note)
        self.print_stack_entry(self.stack[self.curindex])
        self.write(self.prompt)
        self._send(read=self._interrupts)

    def _readable(self, sock):
        """Wait until the socket is readable. Return False if the launcher stops the job."""
        while not _stops():
            if select.select([sock], [], [], _PERIOD)[0]:
                return True
        return False

    def _send(self, **message):
        try:
            self._client.sendall(json.dumps(message).encode() + b"\n", socket.MSG_NOSIGNAL)
        except OSError:  # there is no client
            pass

    def write(self, text):
        self._send(out=text)

    def flush(self):
        pass

    def isatty(self):
        return False

    def readline(self, size=-1):
        """Return a command. Wait for a client if there is none."""
        self._send(read=self._interrupts)
        received = b""
        while self._readable(self._client):
            try:
                data = self._client.recv(1 << 16)
            except OSError:
                data = b""
            received += data
            if not data:
                received = b""
                self._attach()
            elif received.endswith(b"\n"):
                try:
                    message = json.loads(received.decode())
                    if "line" in message:
                        return message["line"] + "\n"
                    self._send(words=self._words(*message["complete"]))
                except (ValueError, KeyError, TypeError):  # this is no `fleetrun debug`
                    self._client.close()
                    self._attach()
                received = b""
        return "EOF"

    def _words(self, *word):
        """Return the completions of a word: its text, the line, and its begin and end in the line."""
        complete = getattr(self, f"complete_{self.parseline(word[1])[0]}", self._complete_expression)
        try:
            return complete(*word) + ([] if word[2] else self.completenames(*word))
        except Exception:  # any object of the script may raise it
            return []


def _stops():
    """Return True if the launcher is stopping this process."""
    return os.path.exists(os.environ.get("FLEETRUN_NOTICE", ""))


def _timeouts():
    """Yield the process groups whose calls time out while this rank is stopped."""
    try:
        for group, name in sys.modules["torch.distributed.distributed_c10d"]._world.pg_names.items():
            backend = group._get_backend(group._device_types[0])
            limit = backend.options._timeout
            if group.size() > 1:
                yield f"{backend.name()} group {name} times out after {limit.total_seconds():g} s"
    except Exception:  # the script may destroy its groups, and torch may lack a private name
        pass
